"""Advantages with mean 0 and variance 1 over what a policy sampled.

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
    if valid.numel() < 2 or math.isclose(valid.min().item(), valid.max().item(), rel_tol=1e-12):
        return torch.zeros_like(values)
    return torch.where(mask, (values - valid.mean()) / torch.sqrt(valid.var() + eps), 0.0)
