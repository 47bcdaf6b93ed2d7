"""GDPO: several rewards per call, normalised one by one before they are added (arXiv 2601.05242).

Invariant: a component that is the same for all members of a group adds exactly 0 there, however large it is, and the
scale of a component does not matter, only its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.group import group_relative
from recipe.dag.credit.whiten import scaled


def gdpo(
    batch: CreditBatch,
    components: Tensor,
    *,
    weights: Sequence[float] = (),
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "call",
) -> list[Tensor]:
    """Advantages: one float32 tensor per row, 0 where the mask is 0. `components`: [C, K] rewards, in the order of the
    batch's calls; `weights`: K numbers, 1 each where absent. The weighted sum of the normalised components is divided
    once by its root mean square over the policy's sampled tokens."""
    weights = tuple(weights) or (1.0,) * components.shape[1]
    if components.shape != (len(batch.uid), len(weights)):
        calls = f"{len(batch.uid)} calls and {len(weights)} weights"
        raise ValueError(f"components: {tuple(components.shape)} does not fit {calls}")
    total = torch.zeros(len(batch.mask), dtype=torch.float64)
    for column, weight in zip(components.double().unbind(1), weights, strict=True):
        one = replace(batch, rewards=column)
        advantages, _ = group_relative(one, group_by=group_by, stat_unit=stat_unit, eps=0.0)
        if advantages:
            total += weight * torch.cat(advantages)
    return batch.per_row(scaled(total, batch.mask))
