"""Packed attention against torch's own, row by row."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipe.dag.policy import varlen
from recipe.dag.policy.varlen import attend

LENGTHS = [1, 5, 7, 2, 16, 3, 33, 1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def states(lengths: list[int], *, heads: int = 4, shared: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return tuple(
        torch.randn(1, count, tokens, 8, generator=draw, dtype=torch.double).requires_grad_()
        for count in (heads, shared, shared)
    )


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def row_by_row(query, key, value, lengths, *, scale, window=None) -> torch.Tensor:
    parts = []
    for q, k, v in zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True):
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        mask = (distance >= 0) & (distance < (window or 10**6))
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_each_row_sees_itself_alone(window, shared):
    inputs = states(LENGTHS, shared=shared)
    found, _ = attend(None, *inputs, None, scaling=0.3, sliding_window=window, position_ids=positions(LENGTHS))
    expected = row_by_row(*inputs, LENGTHS, scale=0.3, window=window)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_given_lengths_replace_positions():
    inputs = states(LENGTHS)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    found, _ = attend(None, *inputs, None, cu_seq_lens_q=ends, max_length_q=max(LENGTHS))
    torch.testing.assert_close(found, attend(None, *inputs, None, position_ids=positions(LENGTHS))[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention_mask": torch.ones(1)}, "does not support attention masks"),
        ({"softcap": 50.0}, "does not support softcap, which this model needs; set sdpa"),
        ({"s_aux": torch.ones(4)}, "does not support s_aux"),
        ({"position_ids": None}, "needs position_ids"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_it_lacks_is_said(wrong, message):
    options = {"attention_mask": None, "position_ids": positions(LENGTHS)} | wrong
    with pytest.raises(ValueError, match=message):
        attend(None, *states(LENGTHS), options.pop("attention_mask"), **options)


def test_dropout_drops():
    inputs = states([64])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        total = torch.stack(
            [attend(None, *inputs, None, position_ids=positions([64]), dropout=0.5)[0] for _ in range(400)]
        )
    assert not torch.equal(total[0], total[1])
    whole, _ = attend(None, *inputs, None, position_ids=positions([64]))
    assert float((total.mean(0) - whole).norm() / whole.norm()) < 0.15


def test_a_padded_batch_is_refused():
    two = [torch.cat([t, t]) for t in states([4])]
    with pytest.raises(ValueError, match="this batch has 2"):
        attend(None, *two, None, position_ids=positions([4]))


@pytest.mark.parametrize("sliding", [False, True])
def test_a_model_of_transformers_runs_on_it(sliding):
    varlen.register()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3, "max_window_layers": 1}
    config = Qwen2Config(**shape, use_sliding_window=sliding, attn_implementation="varlen")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    ids = torch.randint(0, 50, (1, sum(LENGTHS)))
    packed = model(input_ids=ids, position_ids=positions(LENGTHS), use_cache=False).logits
    model.set_attn_implementation("sdpa")
    alone = [model(input_ids=row, use_cache=False).logits for row in ids.split(LENGTHS, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


@needs_gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shared", [2, 4])
def test_torchs_kernel_computes_what_the_plain_path_does(window, shared):
    """In bf16, as GPUs train: gradients, too."""
    lengths = [300, 1, 77, 512, 64]
    plain = [t.detach().repeat(1, 1, 1, 8).cuda() for t in states(lengths, shared=shared)]  # heads of 64
    where = positions(lengths).cuda()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [t.to(dtype).requires_grad_() for t in plain]
        out, _ = attend(None, *inputs, None, scaling=0.1, sliding_window=window, position_ids=where)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).cuda()
        found[dtype] = [out, *torch.autograd.grad((out.float() * weights).sum(), inputs)]
    for half, full in zip(found[torch.bfloat16], found[torch.float32], strict=True):
        assert float((half.float() - full).norm() / full.norm()) < 0.01
