"""REINFORCE, and REINFORCE++: discounted returns per token, normalised once over all sampled tokens of the policy.

Invariant: no group and no baseline model, so one episode per sample is enough; statistics never mix policies, because a
batch holds one policy's rows. A call's reward stands on its last sampled token, the penalty of a token on the token,
and both reach the earlier tokens of the agent's trajectory: that call's, and those of its calls before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.chain import in_order
from recipe.dag.credit.gae import Chained, chained_gae
from recipe.dag.credit.group import center_by_group
from recipe.dag.credit.whiten import scaled, standardised
from recipe.dag.credit.worth import rewards_to_go


def reinforce(batch: CreditBatch, *, gamma: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns), which are the same: one float32 tensor per row, 0 where the mask is 0.

    The return of a sampled token is the sum of its trajectory's rewards from its call on, each times gamma^k, k being
    the agent's sampled tokens between the two (tool results do not discount), less the penalties from it on, discounted
    likewise. Raises ValueError for a gamma outside [0, 1] and for calls of a trajectory that do not say in which order
    they were made.
    """
    if _whole(batch, gamma):
        returns = _spread(batch, _worth(batch))
    else:
        found = _to_go(batch, gamma)
        returns = batch.place(found.tokens, found.returns)
    return returns, returns


def reinforce_pp(batch: CreditBatch, *, gamma: float = 1.0, eps: float = 1e-8) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    Returns as in `reinforce`. Advantage = (return - mean) / sqrt(var + eps), sample variance; exactly 0 if all returns
    are equal. A call without sampled tokens has no token to learn from and counts in nothing.
    """
    if _whole(batch, gamma):
        worth = _worth(batch)
        return _spread(batch, standardised(worth, batch.sampled(), eps)), _spread(batch, worth)
    found = _to_go(batch, gamma)
    return batch.place(found.tokens, standardised(found.returns, eps=eps)), batch.place(found.tokens, found.returns)


def reinforce_pp_baseline(
    batch: CreditBatch,
    *,
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "trajectory",
    gamma_turn: float | None = None,
    eps: float = 1e-8,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    Distance to the mean of the group (0 for a group of one), divided once by its root mean square over all sampled
    tokens of the policy. Dividing does not shift, so a group without a difference stays at exactly 0.
    """
    distances, worth = center_by_group(
        batch, batch.rewards.tolist(), group_by=group_by, stat_unit=stat_unit, gamma_turn=gamma_turn
    )
    advantages = scaled(torch.tensor(distances, dtype=torch.float64), batch.sampled(), eps)
    return _spread(batch, advantages), _spread(batch, torch.tensor(worth, dtype=torch.float64))


def _whole(batch: CreditBatch, gamma: float) -> bool:
    """Whether the tokens of a call have one return, so that they need not be looked at one by one."""
    return gamma == 1.0 and not batch.penalised


def _worth(batch: CreditBatch) -> Tensor:
    """[C] float64"""
    return torch.tensor(rewards_to_go(batch, batch.rewards.tolist()), dtype=torch.float64)


def _spread(batch: CreditBatch, values: Tensor) -> list[Tensor]:
    return batch.per_row(batch.spread(values.to(torch.float32)))


def _to_go(batch: CreditBatch, gamma: float) -> Chained:
    order, chain = in_order(batch, list(batch.trajectories()))
    # without values and with lam 1, an advantage is the discounted sum of the rewards to come
    return chained_gae(batch, order, chain, gamma=gamma, lam=1.0, learns=batch.mask)
