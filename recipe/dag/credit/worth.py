"""What a call is worth: its rewards and those that followed from it.

Invariant: the calls of an agent in an episode are one trajectory, at whichever nodes, turns and rounds it made them, so
a reward that stands on the last of them (an outcome, an env's last step) belongs to all of them. Nothing goes from one
agent to another; estimators that do that chain the calls of an episode (`credit.chain`, `credit.critic`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.options import check_choice, check_units

PLURAL = {"turn": "turns", "round": "rounds", "branch": "branches"}


def worth_of_calls(
    batch: CreditBatch, rewards: Sequence[float], stat_unit: str = "trajectory", gamma_turn: float | None = None
) -> list[float]:
    """Return what each call is worth, [C]; `rewards` [C] are its own.

    `stat_unit="trajectory"`: the sum of its trajectory's rewards. `stat_unit="call"`: its own reward, and with
    `gamma_turn` the later ones of its trajectory, discounted once per step in between (`rewards_to_go`). Raises
    ValueError for an unknown unit, and for a discount where there is nothing to discount.
    """
    check_choice("stat_unit", stat_unit, ("call", "trajectory"))
    if stat_unit == "call":
        return list(rewards) if gamma_turn is None else rewards_to_go(batch, rewards, gamma_turn)
    if gamma_turn is not None:
        raise ValueError("gamma_turn: a trajectory is worth the sum of its rewards already; needs stat_unit call")
    totals = {key: math.fsum(rewards[call] for call in calls) for key, calls in _calls_of(batch).items()}
    return [totals[key] for key in batch.trajectories()]


def rewards_to_go(batch: CreditBatch, rewards: Sequence[float], gamma_turn: float = 1.0) -> list[float]:
    """Return each call's reward and the later ones of its trajectory, discounted by `gamma_turn` from one step to the
    next, [C]. A step is a round of a turn; calls of one step discount nothing between them. Raises ValueError for a
    discount outside [0, 1] and for calls of a trajectory that say neither their position nor their turns and rounds."""
    check_units(gamma_turn=gamma_turn)
    worth = list(rewards)
    for calls in _calls_of(batch).values():
        if len(calls) == 1:
            continue
        _sort(batch, calls)
        step = dict.fromkeys(calls, 0)
        if gamma_turn != 1.0:
            turns, rounds = column_of(batch, "turn", calls), column_of(batch, "round", calls)
            step = {call: (turns[call], rounds[call]) for call in calls}
        for call, following in zip(reversed(calls[:-1]), reversed(calls[1:]), strict=True):
            discount = 1.0 if step[call] == step[following] else gamma_turn
            worth[call] += discount * worth[following]
    return worth


def _sort(batch: CreditBatch, calls: list[int]) -> None:
    """Into the order in which they were made, in place."""
    positions = [batch.position[call] for call in calls]
    if None not in positions:
        calls.sort(key=batch.position.__getitem__)
    elif len({batch.row_of_call[call] for call in calls}) > 1:  # the calls of one row are in order
        turns, rounds = column_of(batch, "turn", calls), column_of(batch, "round", calls)
        calls.sort(key=lambda call: (turns[call], rounds[call]))


def column_of(batch: CreditBatch, key: str, calls: Sequence[int] | None = None) -> Sequence:
    """Return the batch's column `key`, [C]. Raises ValueError where one of `calls` (all, if absent) has no value."""
    column = getattr(batch, key)
    if column is None:
        raise ValueError("prompts were not hashed; make the batch with `from_rows(rows, prompts=True)`")
    for call in range(len(column)) if calls is None else calls:
        if column[call] is None:
            raise ValueError(
                f"{batch.where(call)} does not name its calls' {PLURAL[key]} (call_{PLURAL[key]}), which are needed to "
                "group or order them"
            )
    return column


def _calls_of(batch: CreditBatch) -> dict[tuple, list[int]]:
    """Per trajectory, its calls."""
    calls: dict[tuple, list[int]] = defaultdict(list)
    for call, trajectory in enumerate(batch.trajectories()):
        calls[trajectory].append(call)
    return calls
