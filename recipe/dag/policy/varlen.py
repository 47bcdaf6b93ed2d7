"""Causal attention over packed rows, registered with transformers as `attn_implementation: varlen`.

Invariant: a row attends only to itself, and padding exists only inside the attention call. On CUDA in half precision
the kernel is torch's own `varlen_attn` (no package needed); otherwise rows of similar length go through torch's scaled
dot-product attention together, so that all other code is the same on a CPU and a GPU.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)

from recipe.dag.policy.attention import VARLEN


def register() -> None:
    """Register the attention in transformers as VARLEN. Row offsets separate the rows: it has no function for a mask,
    for which models would look for the rows' starts, and wait for the GPU to find them."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, attend)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **unread: object,
) -> tuple[Tensor, None]:
    """Return the attention of one packed sequence, [1, tokens, heads, head_dim]. In a group of ranks that share rows
    (verl's `ulysses_sequence_parallel_size`), `tokens` are this rank's, and rows are those of all.

    query: [1, heads, tokens, head_dim]; key and value may have fewer heads
    cu_seq_lens_q: [rows + 1], offsets of the rows; without them, a row starts wherever `position_ids` is 0
    max_length_q: length of the longest row
    sliding_window: number of tokens that a token attends to, itself included

    Raises ValueError for options that this attention does not support.
    """
    if query.shape[0] != 1:
        raise ValueError(
            f"attn_implementation {VARLEN} takes packed rows, [1, tokens]; this batch has {query.shape[0]} rows"
        )
    if attention_mask is not None:
        raise ValueError(f"attn_implementation {VARLEN} does not support attention masks; set sdpa instead")
    if unsupported := [name for name in ("softcap", "s_aux", "head_mask") if unread.get(name) is not None]:
        name = unsupported[0]
        raise ValueError(
            f"attn_implementation {VARLEN} does not support {name}, which this model needs; set sdpa instead"
        )
    ranks = get_ulysses_sequence_parallel_world_size()
    if ranks > 1:
        position_ids = None if cu_seq_lens_q is not None else _gathered(position_ids, ranks)
        query, key, value = (_whole_rows(states, ranks) for states in (query, key, value))
    if cu_seq_lens_q is None:
        cu_seq_lens_q, max_length_q = _lengths(position_ids, query.shape[2])
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout:  # the kernel has no dropout
        assert max_length_q is not None  # passed with cu_seq_lens_q, or computed above
        out = _kernel(query, key, value, cu_seq_lens_q, int(max_length_q), scaling, sliding_window)
    else:
        out = _by_length(query, key, value, cu_seq_lens_q.tolist(), scaling, sliding_window, dropout)
    out = out.unsqueeze(0)
    return gather_heads_scatter_seq(out, head_dim=2, seq_dim=1) if ranks > 1 else out, None


def _whole_rows(states: Tensor, ranks: int) -> Tensor:
    """Return all tokens of this rank's share of the heads, from its share of the tokens of all heads,
    [1, heads, tokens, head_dim]. Fewer key and value heads than ranks are repeated, one for each rank."""
    repeats = max(ranks // states.shape[1], 1)
    return gather_seq_scatter_heads(states.repeat_interleave(repeats, dim=1), seq_dim=2, head_dim=1)


def _gathered(position_ids: Tensor | None, ranks: int) -> Tensor | None:
    """Return the positions of all ranks' tokens, which continue each other."""
    if position_ids is None:
        return None
    parts = [torch.empty_like(position_ids) for _ in range(ranks)]
    torch.distributed.all_gather(parts, position_ids.contiguous(), group=get_ulysses_sequence_parallel_group())
    return torch.cat(parts, dim=-1)


def _lengths(position_ids: Tensor | None, tokens: int) -> tuple[Tensor, int]:
    """Return offsets [rows + 1] and the longest length, from positions [1, tokens] that restart at 0 in each row."""
    if position_ids is None:
        raise ValueError(f"attn_implementation {VARLEN} needs position_ids, or cu_seq_lens_q and max_length_q")
    # the last of several axes (multimodal positions): text tokens have the same position on all of them
    starts = (position_ids.reshape(-1, tokens)[-1] == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([tokens])]).to(torch.int32)
    return ends, int(ends.diff().max())


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """Run torch's kernel; all tensors are [tokens, heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn

    # the kernel counts the tokens before and after a token; -1 before is all, 0 after makes it causal
    options: dict[str, Any] = {"scale": scale, "window_size": (window - 1 if window else -1, 0)}
    if query.shape[1] != key.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True  # torch 2.13 on; earlier ones take fewer key and value heads without a word
    # without `return_aux` the kernel returns one tensor
    states = (query.contiguous(), key.contiguous(), value.contiguous())
    return cast(Tensor, varlen_attn(*states, ends, ends, longest, longest, **options))


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, ends: list[int], scale: float | None, window: int | None, dropout: float
) -> Tensor:
    """Run the same in plain torch, with one call per group of rows of similar length.

    Lengths in a group have the same number of bits, so padding less than doubles the tokens. The padding is at a row's
    end, so causal attention never reads it.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(ends, ends[1:], strict=False):
        groups.setdefault((end - start).bit_length(), []).append((start, end - start))
    outputs, positions = [], []
    for rows in groups.values():
        starts, lengths = torch.tensor(rows, device=query.device).unsqueeze(-1).unbind(1)
        steps = torch.arange(max(length for _, length in rows), device=query.device)
        # a padded position reads the row's last token again, and its output is dropped by `real`
        index, real = starts + steps.minimum(lengths - 1), steps < lengths
        states = (t[index].transpose(1, 2) for t in (query, key, value))  # [rows, heads, length, head_dim]
        mask = None if window is None or window >= len(steps) else _band(steps, window)
        gqa = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            *states, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=gqa
        )
        outputs.append(out.transpose(1, 2)[real])
        positions.append(index[real])
    # from the order of the groups back to the order of the packed tokens
    return torch.cat(outputs)[torch.cat(positions).argsort()]


def _band(steps: Tensor, window: int) -> Tensor:
    distance = steps[:, None] - steps[None]
    return (distance >= 0) & (distance < window)
