"""The kernels between the two products of frozen output embeddings: of a token's logits, its log-prob and entropy, and
the gradients of both.

Invariant: logits are fp32 [tokens, vocabulary], and so is all that is computed with them. Triton is installed with
torch for CUDA: `frozen_head` imports this module on a GPU alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _score(logits, tokens, log_probs, entropies, norms, scale, vocabulary: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    column = tl.arange(0, block)
    # of each lane: the largest logit, the sum of exponentials over that of it, and the same weighted by the logits
    high = tl.full((block,), -1e30, tl.float32)
    total, weighted = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for start in range(0, vocabulary, block):
        x = tl.load(logits + start + column, mask=start + column < vocabulary, other=-1e30) * scale
        higher = tl.maximum(high, x)
        before, new = tl.exp(high - higher), tl.exp(x - higher)
        total, weighted, high = total * before + new, weighted * before + new * x, higher
    highest = tl.max(high, 0)
    share = tl.exp(high - highest)
    sum_of_all = tl.sum(total * share, 0)
    norm = highest + tl.log(sum_of_all)
    chosen = tl.load(logits + tl.load(tokens + row)) * scale
    tl.store(log_probs + row, chosen - norm)
    tl.store(entropies + row, norm - tl.sum(weighted * share, 0) / sum_of_all)
    tl.store(norms + row, norm)


@triton.jit
def _differentiate(
    logits,
    tokens,
    norms,
    entropies,
    d_log_probs,
    d_entropies,
    out,
    scale,
    vocabulary: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    exists, start = column < vocabulary, row.to(tl.int64) * vocabulary
    log_prob = tl.load(logits + start + column, mask=exists, other=0.0) * scale - tl.load(norms + row)
    prob = tl.exp(log_prob)
    gradient = tl.where(column == tl.load(tokens + row), 1.0, 0.0) - prob
    if scaled:
        gradient *= tl.load(d_log_probs + row)
        gradient -= tl.load(d_entropies + row) * prob * (log_prob + tl.load(entropies + row))
    tl.store(out + start + column, (gradient * scale).to(out.dtype.element_ty), mask=exists)


def score(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return, [tokens] each, log-probs of `tokens`, entropies, and logarithms of the sums of exponentials."""
    log_probs, entropies, norms = logits.new_empty(3, len(logits))
    _score[(len(logits),)](  # pyright: ignore[reportIndexIssue]  # what Triton's decorator makes of it
        logits, tokens, log_probs, entropies, norms, 1.0 / temperature, logits.shape[1], block=BLOCK, num_warps=8
    )
    return log_probs, entropies, norms


def differentiate(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    dtype: torch.dtype,
    norms: Tensor,
    entropies: Tensor,
    d_log_probs: Tensor | None = None,
    d_entropies: Tensor | None = None,
) -> Tensor:
    """Return the gradients [tokens, vocabulary] with respect to the logits: of the log-probs, or, with both incoming
    gradients, of log-probs and entropies."""
    out = torch.empty_like(logits, dtype=dtype)
    scaled = d_log_probs is not None
    blocks = triton.cdiv(logits.shape[1], BLOCK)
    _differentiate[(len(logits), blocks)](  # pyright: ignore[reportIndexIssue]  # as above
        *(logits, tokens, norms, entropies, d_log_probs if scaled else norms, d_entropies if scaled else norms, out),
        *(1.0 / temperature, logits.shape[1]),
        scaled=scaled,
        block=BLOCK,
        num_warps=8,
    )
    return out
