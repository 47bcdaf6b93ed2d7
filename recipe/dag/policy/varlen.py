"""Causal attention over packed rows, registered with transformers as `attn_implementation: varlen`.

Invariant: a row sees itself alone, and no row is padded in memory that lives longer than the attention itself. On CUDA,
in half precision, the kernel is torch's own `varlen_attn` (no package needed); elsewhere rows of similar length go
through torch's scaled dot-product attention together, so the CPU runs every other line that a GPU runs.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from recipe.dag.policy.attention import VARLEN


def register() -> None:
    """Make transformers know the attention under VARLEN, without a mask: rows are told apart by where they start."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(VARLEN, attend)
    AttentionMaskInterface.register(VARLEN, lambda *args, **kwargs: None)


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
    """Return the attention of one packed sequence, [1, tokens, heads, head_dim].

    query [1, heads, tokens, head_dim]; key and value may have fewer heads. `cu_seq_lens_q` [rows + 1] says where rows
    start and end, and `max_length_q` how long the longest is; without them, rows start where `position_ids` are 0.
    `sliding_window`: how many tokens a token sees, itself included. Raises ValueError for what this attention lacks.
    """
    if query.shape[0] != 1:
        raise ValueError(
            f"attn_implementation {VARLEN} takes packed rows, [1, tokens]; this batch has {query.shape[0]}"
        )
    if attention_mask is not None:
        raise ValueError(f"attn_implementation {VARLEN} knows no attention mask; set sdpa instead")
    if lacks := [name for name in ("softcap", "s_aux", "head_mask") if unread.get(name) is not None]:
        raise ValueError(f"attn_implementation {VARLEN} has no {lacks[0]}, which this model needs; set sdpa instead")
    if cu_seq_lens_q is None:
        cu_seq_lens_q, max_length_q = _lengths(position_ids, query.shape[2])
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout:  # the kernel has none
        out = _kernel(query, key, value, cu_seq_lens_q, int(max_length_q), scaling, sliding_window)
    else:
        out = _by_length(query, key, value, cu_seq_lens_q.tolist(), scaling, sliding_window, dropout)
    return out.unsqueeze(0), None


def _lengths(position_ids: Tensor | None, tokens: int) -> tuple[Tensor, int]:
    """Cumulative lengths and the longest one, from positions [1, tokens] that restart at 0."""
    if position_ids is None:
        raise ValueError(f"attn_implementation {VARLEN} needs position_ids, or cu_seq_lens_q and max_length_q")
    starts = (position_ids.reshape(-1, tokens)[-1] == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([tokens])]).to(torch.int32)
    return ends, int(ends.diff().max())


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """torch's kernel; all [tokens, heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, object] = {"scale": scale, "window_size": (window - 1 if window else -1, 0)}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.13 on
            options["enable_gqa"] = True
        else:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    return varlen_attn(query, key, value, ends, ends, longest, longest, **options)


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, ends: list[int], scale: float | None, window: int | None, dropout: float
) -> Tensor:
    """The same in plain torch: rows whose lengths have as many bits are padded to each other (to less than twice their
    tokens) and attend in one call. A causal row never sees the padding, which is behind it."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(ends, ends[1:], strict=False):
        groups.setdefault((end - start).bit_length(), []).append((start, end - start))
    outputs, places = [], []
    for rows in groups.values():
        starts, lengths = torch.tensor(rows, device=query.device).unsqueeze(-1).unbind(1)
        steps = torch.arange(max(length for _, length in rows), device=query.device)
        index, real = starts + steps.minimum(lengths - 1), steps < lengths
        states = (t[index].transpose(1, 2) for t in (query, key, value))  # [rows, heads, length, head_dim]
        mask = None if window is None or window >= len(steps) else _band(steps, window)
        gqa = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            *states, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=gqa
        )
        outputs.append(out.transpose(1, 2)[real])
        places.append(index[real])
    return torch.cat(outputs)[torch.cat(places).argsort()]


def _band(steps: Tensor, window: int) -> Tensor:
    distance = steps[:, None] - steps[None]
    return (distance >= 0) & (distance < window)
