"""Advantages on one scale over what a policy sampled.

Invariant: the mask alone says what counts; an advantage that happens to be 0.0 is a value like any other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def whitened(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """[N] -> [N]: (values - mean) / sqrt(sample variance + eps) over the mask, 0 outside it; exactly 0 throughout if
    all values under the mask are equal."""
    valid = values[mask]
    out = torch.zeros_like(values)
    if valid.numel() < 2:
        return out
    low, high = torch.aminmax(valid)
    if math.isclose(low.item(), high.item(), rel_tol=1e-12):
        return out
    variance, mean = torch.var_mean(valid)
    return out.masked_scatter_(mask, valid.sub_(mean).div_(torch.sqrt(variance + eps)))


def scaled(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """[N] -> [N]: values / sqrt(mean square + eps) over the mask, 0 outside it; 0 stays 0."""
    values = values * mask
    return values / torch.sqrt(values.square().sum() / mask.sum().clamp_min(1) + eps)
