"""Returns of calls: a call's own reward and those that followed from it.

Invariant: the calls of an agent in an episode are one trajectory, at whichever nodes, turns and rounds they were made,
so a reward on the last of them (an outcome, an env's last step) belongs to all of them. Nothing is passed from one
agent to another; the estimators that do so join all calls of an episode (`credit.chain`, `credit.critic`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.options import check_choice, check_units


def call_returns(batch: CreditBatch, rewards: Sequence[float], stat_unit: str, gamma_turn: float | None) -> list[float]:
    """Return [C] the return of each call; `rewards` [C] are the calls' own.

    `stat_unit="trajectory"`: the sum of the trajectory's rewards. `stat_unit="call"`: the call's own reward or, with
    `gamma_turn`, its `returns_to_go`. Raises ValueError for an unknown unit, and for a discount of whole trajectories.
    """
    check_choice("stat_unit", stat_unit, ("call", "trajectory"))
    if stat_unit == "call":
        return list(rewards) if gamma_turn is None else returns_to_go(batch, rewards, gamma_turn)
    if gamma_turn is not None:
        raise ValueError("gamma_turn: the return of a trajectory is not discounted; needs stat_unit call")
    totals = {key: math.fsum(rewards[call] for call in calls) for key, calls in _calls_by_trajectory(batch).items()}
    return [totals[key] for key in batch.trajectories()]


def returns_to_go(batch: CreditBatch, rewards: Sequence[float], gamma_turn: float) -> list[float]:
    """Return [C] each call's reward plus the later ones of its trajectory, discounted by `gamma_turn` per step.

    The exponent is the difference of the calls' steps, whichever calls in between are in the batch. A discount of 0
    leaves each call its own reward, also among calls of one step. Raises ValueError for a discount outside [0, 1].
    """
    check_units(gamma_turn=gamma_turn)
    returns = list(rewards)
    if gamma_turn == 0.0:
        return returns
    for calls in _calls_by_trajectory(batch).values():
        calls.sort(key=batch.position.__getitem__)
        # from the end, so that the return of the following call is complete when it is added
        for call, following in zip(reversed(calls[:-1]), reversed(calls[1:]), strict=True):
            returns[call] += gamma_turn ** (batch.step[following] - batch.step[call]) * returns[following]
    return returns


def _calls_by_trajectory(batch: CreditBatch) -> dict[tuple, list[int]]:
    calls: dict[tuple, list[int]] = defaultdict(list)
    for call, trajectory in enumerate(batch.trajectories()):
        calls[trajectory].append(call)
    return calls
