"""GDPO: several rewards per call, each normalized by itself before they are added (arXiv 2601.05242).

Invariant: a component that is equal for all members of a group adds exactly 0 there, however large it is; the scale of
a component has no effect, only its weight has. Components are named by the nodes that paid them: a reward node, or a
rollout node for its env.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.group import center_by_group
from recipe.dag.credit.whiten import divide_by_rms


def gdpo(
    batch: CreditBatch,
    *,
    weights: Mapping[str, float],
    group_by: Sequence[str],
    stat_unit: str,
    gamma_turn: float | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    With components k and weights w_k (1 where `weights` does not name the component),

        a = sum_k w_k (R_k - mean(R_k)) / std(R_k) over the group,    A = a / rms(a) over the policy's sampled tokens

    with the sample standard deviation (n - 1). The return of a token is the weighted sum of its call's returns
    (`call_returns`).
    """
    calls = len(batch.uid)
    advantages_C = torch.zeros(calls, dtype=torch.float64)
    returns_C = torch.zeros(calls, dtype=torch.float64)
    for weight, rewards in components(batch, weights).values():
        normalized, returns = center_by_group(
            batch, rewards, group_by=group_by, stat_unit=stat_unit, gamma_turn=gamma_turn, scale="std"
        )
        advantages_C += weight * torch.tensor(normalized, dtype=torch.float64)
        returns_C += weight * torch.tensor(returns, dtype=torch.float64)
    # the sum of several unit-variance terms has another scale, which would act like a learning rate
    advantages_C = divide_by_rms(advantages_C, batch.sampled())
    return batch.broadcast_to_rows(advantages_C), batch.broadcast_to_rows(returns_C)


def components(batch: CreditBatch, weights: Mapping[str, float]) -> dict[str, tuple[float, list[float]]]:
    """Return (weight, [C] reward of each call) by the component's name, sorted; components of weight 0 are left out."""
    names = sorted({name for parts in batch.parts for name in parts})
    weighted = {}
    for name in names:
        weight = weights.get(name, 1.0)
        if weight != 0:
            weighted[name] = weight, [parts.get(name, 0.0) for parts in batch.parts]
    return weighted
