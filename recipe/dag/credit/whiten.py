"""Advantages on one scale over what a policy sampled.

Invariant: tokens that were sampled count, each once, and no others; an advantage that happens to be 0.0 is a value like
any other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def standardised(values: Tensor, counts: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """[M] -> [M]: (values - mean) / sqrt(sample variance + eps), all 0 if all are equal. `counts` [M]: how many tokens
    each value stands for; 1 each where absent, one of no token has no part in the statistics."""
    seen = values if counts is None else values[counts > 0]
    total = values.numel() if counts is None else int(counts.sum())
    if total < 2:
        return torch.zeros_like(values)
    low, high = torch.aminmax(seen)
    if math.isclose(low.item(), high.item(), rel_tol=1e-12):
        return torch.zeros_like(values)
    if counts is None:
        variance, mean = torch.var_mean(values)
    else:
        mean = (values * counts).sum() / total
        variance = ((values - mean).square() * counts).sum() / (total - 1)
    return (values - mean).div_(torch.sqrt(variance + eps))


def standardised_by(values: Tensor, members: Tensor | None, counts: Tensor | None = None) -> Tensor:
    """`standardised`, for the values of each member by themselves; `members` [M] int64: equal for values of one member,
    None: there is one."""
    if members is None:
        return standardised(values, counts)
    out = torch.zeros_like(values)
    for member in members.unique():
        mine = members == member
        out[mine] = standardised(values[mine], None if counts is None else counts[mine])
    return out


def scaled(values: Tensor, counts: Tensor, eps: float = 1e-8) -> Tensor:
    """[M] -> [M]: values / sqrt(mean square + eps), each value counting for `counts` tokens; 0 stays 0."""
    return values / torch.sqrt((values.square() * counts).sum() / counts.sum().clamp_min(1) + eps)
