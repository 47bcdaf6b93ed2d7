"""REINFORCE, and REINFORCE++: discounted returns per token, normalized once over all sampled tokens of the policy.

Invariant: `reinforce` and `reinforce_pp` need neither a group nor a critic, so one episode per sample is enough;
statistics never mix policies, because a batch holds one policy's rows. A call's reward is paid on its last sampled
token, the penalty of a token on that token, and both reach the earlier tokens of the same call and, unless the unit is
a call, of the calls before it in the agent's trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.chain import sort_by_sequence
from recipe.dag.credit.gae import TokenAdvantages, sequence_gae
from recipe.dag.credit.group import center_by_group
from recipe.dag.credit.options import check_choice
from recipe.dag.credit.returns import call_returns
from recipe.dag.credit.whiten import divide_by_rms, standardize


def reinforce(batch: CreditBatch, *, gamma: float, stat_unit: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0. They differ by the baseline of
    the call's role, if the batch has one.

    The return of a sampled token is the sum of its trajectory's rewards from its call on, each times gamma^k, where k
    counts the agent's sampled tokens in between (tool results do not discount), less the penalties from that token on,
    discounted likewise. With `stat_unit="call"`, each call is a trajectory by itself. Raises ValueError for a gamma
    outside [0, 1] and for another unit.
    """
    if _one_return_per_call(batch, gamma):
        returns_C = _returns_to_go(batch, stat_unit)
        return batch.broadcast_to_rows(returns_C - batch.baselines), batch.broadcast_to_rows(returns_C)
    tokens = _discounted_returns(batch, gamma, stat_unit)
    baselines_L = batch.per_token(batch.baselines)[tokens.tokens]
    advantages = batch.scatter_to_rows(tokens.tokens, tokens.returns - baselines_L)
    return advantages, batch.scatter_to_rows(tokens.tokens, tokens.returns)


def reinforce_pp(batch: CreditBatch, *, gamma: float, stat_unit: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    Returns are those of `reinforce`; the advantage is (return - mean) / sqrt(var + EPS) with the sample variance over
    all sampled tokens, exactly 0 if all returns are equal. A call without sampled tokens is not part of the statistics.
    """
    if _one_return_per_call(batch, gamma):
        returns_C = _returns_to_go(batch, stat_unit)
        return batch.broadcast_to_rows(standardize(returns_C, batch.sampled())), batch.broadcast_to_rows(returns_C)
    tokens = _discounted_returns(batch, gamma, stat_unit)
    advantages_L = standardize(tokens.returns)
    return batch.scatter_to_rows(tokens.tokens, advantages_L), batch.scatter_to_rows(tokens.tokens, tokens.returns)


def reinforce_pp_baseline(
    batch: CreditBatch, *, group_by: Sequence[str], stat_unit: str, gamma_turn: float | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    The advantage is the distance to the group's mean (0 for a group of one), divided once by its root mean square over
    all sampled tokens of the policy. Dividing does not shift, so a group of equal returns stays at exactly 0.
    """
    centered, returns = center_by_group(
        batch, batch.rewards.tolist(), group_by=group_by, stat_unit=stat_unit, gamma_turn=gamma_turn, scale="none"
    )
    advantages_C = divide_by_rms(torch.tensor(centered, dtype=torch.float64), batch.sampled())
    return batch.broadcast_to_rows(advantages_C), batch.broadcast_to_rows(torch.tensor(returns, dtype=torch.float64))


def _one_return_per_call(batch: CreditBatch, gamma: float) -> bool:
    """Return True if all tokens of a call have the same return, which saves the scan over tokens."""
    return gamma == 1.0 and not batch.penalized


def _returns_to_go(batch: CreditBatch, stat_unit: str) -> Tensor:
    """Return [C] float64."""
    discount = None if _is_call(stat_unit) else 1.0
    return torch.tensor(call_returns(batch, batch.rewards.tolist(), "call", discount), dtype=torch.float64)


def _discounted_returns(batch: CreditBatch, gamma: float, stat_unit: str) -> TokenAdvantages:
    keys = range(len(batch.row_of_call)) if _is_call(stat_unit) else list(batch.trajectories())
    call_order, sequence_ids = sort_by_sequence(batch, keys)
    # with values of 0 and lam = 1, GAE is the discounted sum of the rewards to come
    return sequence_gae(batch, call_order, sequence_ids, gamma=gamma, lam=1.0, learns=batch.mask)


def _is_call(stat_unit: str) -> bool:
    check_choice("stat_unit", stat_unit, ("call", "trajectory"))
    return stat_unit == "call"
