"""GDPO: several rewards per call, normalised one by one before they are added (arXiv 2601.05242).

Invariant: a component that is the same for all members of a group adds exactly 0 there, however large it is, and the
scale of a component does not matter, only its weight. Components are named by the nodes that paid them: a reward node,
or a rollout node for its env.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.group import center_by_group
from recipe.dag.credit.whiten import scaled


def gdpo(
    batch: CreditBatch,
    *,
    weights: Mapping[str, float] | None = None,
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "trajectory",
    gamma_turn: float | None = None,
    eps: float = 1e-8,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    Each component's distance to the mean of the group, in standard deviations (n - 1), times its weight (1 where
    `weights` does not name it); their sum is divided once by its root mean square over the policy's sampled tokens. The
    return of a token is the weighted sum of what its call is worth (`worth_of_calls`). Raises ValueError for rows that
    do not say who paid their calls.
    """
    calls = len(batch.uid)
    advantages, returns = (torch.zeros(calls, dtype=torch.float64) for _ in range(2))
    for weight, rewards in components(batch, weights or {}).values():
        distances, worth = center_by_group(
            batch, rewards, group_by=group_by, stat_unit=stat_unit, gamma_turn=gamma_turn, scale="std"
        )
        advantages += weight * torch.tensor(distances, dtype=torch.float64)
        returns += weight * torch.tensor(worth, dtype=torch.float64)
    columns = scaled(advantages, batch.sampled(), eps), returns
    return tuple(batch.per_row(batch.spread(column.to(torch.float32))) for column in columns)


def components(batch: CreditBatch, weights: Mapping[str, float]) -> dict[str, tuple[float, list[float]]]:
    """By name, sorted: (weight, [C] what it paid for each call). Those of weight 0 are left out."""
    if None in batch.parts:
        row = batch.row_of_call[batch.parts.index(None)]
        raise ValueError(f"row {row}: its calls do not say who paid them (call_parts), which gdpo needs")
    names = sorted({name for parts in batch.parts for name in parts})
    columns = {name: [parts.get(name, 0.0) for parts in batch.parts] for name in names}
    return {name: (weights.get(name, 1.0), column) for name, column in columns.items() if weights.get(name, 1.0) != 0}
