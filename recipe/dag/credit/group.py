"""Group-relative advantages: GRPO, its leave-one-out form (RLOO) and its unscaled form.

Invariant: a unit is compared with the units of its own group only. A group of one unit, and a group whose units all
earned the same, give an advantage of exactly 0: there is nothing to learn from them. Sums are exact (`fsum`), so the
order of the rows has no effect on the statistics.

With `group_by=("uid", "agent")` this is Dr.MAS's normalisation per agent; with `("uid", "agent", "turn")` AT-GRPO's;
with `("uid",)` plain GRPO that pools all agents of the policy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch

KEYS = ("uid", "agent", "turn", "node")
SAME = 1e-12
"""Spread, relative or absolute, within which rewards count as equal: sums of equal parts differ by rounding alone."""


def group_relative(
    batch: CreditBatch,
    *,
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "call",
    center: str = "mean",
    scale: str = "std",
    eps: float = 1e-6,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    `stat_unit="trajectory"`: a unit is one episode's calls within the group, worth the sum of their rewards; each of
    them gets the unit's advantage. `scale="std"` divides by the sample standard deviation (n - 1) plus `eps`. The
    return of a token is what its unit earned. A call without sampled tokens counts in the statistics. Raises
    ValueError for an unknown option, and for a merged row that does not name the turns by which it is to be grouped.
    """
    _check_option("center", center, ("mean", "leave_one_out"))
    _check_option("scale", scale, ("std", "none"))
    advantages, returns = [0.0] * len(batch.uid), [0.0] * len(batch.uid)
    for units, values in _groups(batch, group_by, stat_unit):
        for unit, value, advantage in zip(units, values, _relative(values, center, scale, eps), strict=True):
            for call in unit:
                advantages[call], returns[call] = advantage, value
    spread = (batch.spread(torch.tensor(column, dtype=torch.float32)) for column in (advantages, returns))
    return tuple(map(batch.per_row, spread))


def zero_variance(
    batch: CreditBatch, *, group_by: Sequence[str] = ("uid", "agent"), stat_unit: str = "call"
) -> list[bool]:
    """Per row: True if none of its calls can carry a gradient, because their groups earned one and the same. A row that
    merges calls of several groups is False as soon as one of them has something to compare."""
    flat = [True] * len(batch.row_lengths)
    for units, values in _groups(batch, group_by, stat_unit):
        if not _all_same(values):
            for call in (call for unit in units for call in unit):
                flat[batch.row_of_call[call]] = False
    return flat


def _relative(values: list[float], center: str, scale: str, eps: float) -> list[float]:
    count = len(values)
    if _all_same(values):
        return [0.0] * count
    mean = math.fsum(values) / count
    centred = [value - mean for value in values]
    spread = math.sqrt(math.fsum(c * c for c in centred) / (count - 1)) + eps if scale == "std" else 1.0
    # x - mean(others) = n / (n - 1) * (x - mean)
    factor = count / (count - 1) if center == "leave_one_out" else 1.0
    return [factor * c / spread for c in centred]


def _all_same(values: list[float]) -> bool:
    return math.isclose(min(values), max(values), rel_tol=SAME, abs_tol=SAME)


def _groups(
    batch: CreditBatch, group_by: Sequence[str], stat_unit: str
) -> Iterator[tuple[list[list[int]], list[float]]]:
    """Per group: its units, each a list of indices into the batch's columns, and what each unit earned."""
    _check_option("stat_unit", stat_unit, ("call", "trajectory"))
    for key in group_by:
        _check_option("group_by", key, KEYS)
    columns = [getattr(batch, key) for key in group_by]
    groups: dict[tuple, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for call, trajectory in enumerate(zip(batch.uid, batch.episode, strict=True)):
        group = tuple(column[call] for column in columns)
        if None in group:
            raise ValueError(
                f"row of uid {batch.uid[call]}, episode {batch.episode[call]}, agent {batch.agent[call]} merges calls "
                "without naming their turns (call_turns), so it cannot be grouped by turn"
            )
        groups[group][call if stat_unit == "call" else trajectory].append(call)
    rewards = batch.rewards.tolist()
    for units in groups.values():
        yield list(units.values()), [math.fsum(rewards[call] for call in calls) for calls in units.values()]


def _check_option(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
