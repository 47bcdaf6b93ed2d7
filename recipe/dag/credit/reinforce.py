"""REINFORCE, and REINFORCE++: discounted returns per token, normalised once over all sampled tokens of the policy.

Invariant: no group and no baseline model, so one episode per sample is enough; statistics never mix policies, because a
batch holds one policy's rows. A call's reward stands on its last sampled token, the penalty of a token on the token,
and both reach that call's tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.gae import Chained, chained_gae
from recipe.dag.credit.group import compared
from recipe.dag.credit.whiten import scaled, standardised


def reinforce(batch: CreditBatch, *, gamma: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns), which are the same: one float32 tensor per row, 0 where the mask is 0.

    The return of a sampled token is gamma^k times its call's reward, k being the sampled tokens of the call after it
    (tool results in between do not discount), less the penalties from it on, discounted likewise. Raises ValueError for
    a gamma outside [0, 1].
    """
    if _whole(batch, gamma):
        returns = _spread(batch, batch.rewards)
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
        return _spread(batch, standardised(batch.rewards, batch.sampled(), eps)), _spread(batch, batch.rewards)
    found = _to_go(batch, gamma)
    return batch.place(found.tokens, standardised(found.returns, eps=eps)), batch.place(found.tokens, found.returns)


def reinforce_pp_baseline(
    batch: CreditBatch,
    *,
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "call",
    eps: float = 1e-8,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    Distance to the mean of the group (0 for a group of one), divided once by its root mean square over all sampled
    tokens of the policy. Dividing does not shift, so a group without a difference stays at exactly 0.
    """
    away, earned = compared(batch, batch.rewards.tolist(), group_by=group_by, stat_unit=stat_unit)
    distances = scaled(torch.tensor(away, dtype=torch.float64), batch.sampled(), eps)
    return _spread(batch, distances), _spread(batch, torch.tensor(earned, dtype=torch.float64))


def _whole(batch: CreditBatch, gamma: float) -> bool:
    """Every token's return is its call's reward, so tokens need not be looked at one by one."""
    return gamma == 1.0 and not batch.penalised


def _spread(batch: CreditBatch, values: Tensor) -> list[Tensor]:
    return batch.per_row(batch.spread(values.to(torch.float32)))


def _to_go(batch: CreditBatch, gamma: float) -> Chained:
    calls = range(len(batch.row_of_call))
    # without values and with lam 1, an advantage is the discounted sum of the rewards to come
    return chained_gae(batch, calls, calls, gamma=gamma, lam=1.0, learns=batch.mask)
