"""REINFORCE++: discounted returns per token, whitened once over all sampled tokens of the policy's batch.

Invariant: no group and no baseline model, so one episode per sample is enough; statistics never mix policies, because a
batch holds one policy's rows. A call's reward stands on its last sampled token and reaches that call's tokens only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch


def reinforce_pp(batch: CreditBatch, *, gamma: float = 1.0, eps: float = 1e-8) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    The return of a sampled token is gamma^k times its call's reward, k being the sampled tokens of the call after it:
    tool results in between do not discount. Advantage = (return - mean) / sqrt(var + eps), sample variance; exactly 0
    if all returns are equal. A call without sampled tokens has no token to learn from and counts in nothing. Raises
    ValueError for a gamma outside [0, 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma: {gamma} is not between 0 and 1")
    sampled = batch.mask.cumsum(0)
    ends = batch.call_lengths.cumsum(0)
    # Sampled tokens among the first p, for p = 0 ... N: calls without tokens at the start have an end, too.
    so_far = torch.cat([torch.zeros(1, dtype=torch.int64), sampled])
    after = so_far[ends].repeat_interleave(batch.call_lengths) - sampled
    returns = batch.spread(batch.rewards) * torch.pow(torch.tensor(gamma, dtype=torch.float64), after)
    return batch.per_row(_whiten(returns, batch.mask, eps)), batch.per_row(returns)


def _whiten(values: Tensor, mask: Tensor, eps: float) -> Tensor:
    """[N] -> [N] with mean 0 and variance 1 over the mask, 0 outside it."""
    valid = values[mask]
    if valid.numel() < 2 or math.isclose(valid.min().item(), valid.max().item(), rel_tol=1e-12):
        return torch.zeros_like(values)
    return torch.where(mask, (values - valid.mean()) / torch.sqrt(valid.var() + eps), 0.0)
