"""Group-relative advantages: GRPO, its leave-one-out form (RLOO), its unscaled form and MAGRPO.

Invariant: the calls of an agent in an episode are its trajectory, and a trajectory counts once in its group's mean and
deviation, however many calls it has. A group of one trajectory, and a group whose members are all worth the same, give
an advantage of exactly 0: there is nothing to learn from them. Sums are exact (`fsum`), so the order of the rows has no
effect on the statistics.

Why once: where an agent decides how long it talks, a baseline that counts calls depends on that decision, and the
gradient then prefers long or short episodes whatever they earn (the stopping game of docs/credit.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.options import check_choice
from recipe.dag.credit.worth import column_of, worth_of_calls

KEYS = ("uid", "agent", "role", "turn", "round", "node", "branch", "prompt_hash")
SAME = 1e-12
"""Spread, relative or absolute, within which rewards count as equal: sums of equal parts differ by rounding alone."""


def group_relative(
    batch: CreditBatch,
    credits: Sequence[float] | None = None,
    *,
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "trajectory",
    center: str = "mean",
    scale: str = "std",
    gamma_turn: float | None = None,
    eps: float = 1e-6,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    The return of a token is what its call is worth: `stat_unit` and `gamma_turn` as in `worth_of_calls`. It is compared
    with the calls of its group. `scale="std"` divides by the group's sample standard deviation (n - 1, n trajectories)
    plus `eps`. `center="leave_one_out"` subtracts the mean of the other trajectories. Calls without sampled tokens add
    to what their trajectory is worth and are not compared. `credits`: per call, added to the distance without being
    centered, because it has a baseline of its own already; both are divided by the root mean square of their sum.
    Raises ValueError for an unknown option and for a merged row that does not name the turns or rounds by which it is
    to be grouped or ordered.
    """
    check_choice("center", center, ("mean", "leave_one_out"))
    check_choice("scale", scale, ("std", "none"))
    worth = worth_of_calls(batch, batch.rewards.tolist(), stat_unit, gamma_turn)
    advantages = _distances(batch, worth, group_by, center=center, scale=scale, eps=eps, credits=credits)
    columns = (batch.spread(torch.tensor(column, dtype=torch.float32)) for column in (advantages, worth))
    return tuple(map(batch.per_row, columns))


def zero_variance(
    batch: CreditBatch,
    *,
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "trajectory",
    gamma_turn: float | None = None,
    rewards: Sequence[float] | None = None,
) -> list[bool]:
    """Return per row: True if none of its calls can carry a gradient, because their groups earned one and the same. A
    row that merges calls of several groups is False as soon as one of them has something to compare. `rewards`: per
    call, in place of the batch's."""
    flat = [True] * len(batch.row_lengths)
    rewards = batch.rewards.tolist() if rewards is None else rewards
    worth = worth_of_calls(batch, rewards, stat_unit, gamma_turn)
    for trajectories in _groups(batch, group_by):
        calls = [call for trajectory in trajectories for call in trajectory]
        if not _all_same([worth[call] for call in calls]):
            for call in calls:
                flat[batch.row_of_call[call]] = False
    return flat


def center_by_group(
    batch: CreditBatch,
    rewards: Sequence[float],
    *,
    group_by: Sequence[str],
    stat_unit: str,
    gamma_turn: float | None = None,
    scale: str = "none",
    eps: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Return per call (its distance to its group's mean, what it is worth); `rewards`: per call."""
    worth = worth_of_calls(batch, rewards, stat_unit, gamma_turn)
    return _distances(batch, worth, group_by, center="mean", scale=scale, eps=eps), worth


def _distances(
    batch: CreditBatch,
    worth: Sequence[float],
    group_by: Sequence[str],
    *,
    center: str,
    scale: str,
    eps: float,
    credits: Sequence[float] | None = None,
) -> list[float]:
    """Per call; 0 for those without sampled tokens."""
    distances = [0.0] * len(worth)
    for trajectories in _groups(batch, group_by):
        values = [[worth[call] for call in calls] for calls in trajectories]
        beside = [[credits[call] for call in calls] for calls in trajectories] if credits is not None else None
        relative = _relative(values, center, scale, eps, beside)
        for calls, of_trajectory in zip(trajectories, relative, strict=True):
            for call, distance in zip(calls, of_trajectory, strict=True):
                distances[call] = distance
    return distances


def _relative(
    values: list[list[float]], center: str, scale: str, eps: float, beside: list[list[float]] | None
) -> list[list[float]]:
    """Per trajectory and call of one group."""
    count = len(values)
    same = _all_same([value for trajectory in values for value in trajectory])
    if count == 1 or (same and beside is None):
        return [[0.0] * len(trajectory) for trajectory in values]
    means = [_mean(trajectory) for trajectory in values]
    mean = _mean(means)
    beside = beside or [[0.0] * len(trajectory) for trajectory in values]
    distances = [
        [(0.0 if same else value - mean) + extra for value, extra in zip(trajectory, extras, strict=True)]
        for trajectory, extras in zip(values, beside, strict=True)
    ]
    deviation = 1.0
    if scale == "std":
        squares = [_mean([distance**2 for distance in of_trajectory]) for of_trajectory in distances]
        deviation = math.sqrt(math.fsum(squares) / (count - 1)) + eps
    # x - mean(others) = x - mean + (own mean - mean) / (n - 1)
    left_out = center == "leave_one_out" and not same
    shifts = [(own - mean) / (count - 1) if left_out else 0.0 for own in means]
    return [
        [(distance + shift) / deviation for distance in of_trajectory]
        for of_trajectory, shift in zip(distances, shifts, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _all_same(values: list[float]) -> bool:
    return math.isclose(min(values), max(values), rel_tol=SAME, abs_tol=SAME)


def _groups(batch: CreditBatch, group_by: Sequence[str]) -> Iterator[list[list[int]]]:
    """Per group: its trajectories, each a list of the calls that it has in the group."""
    for key in group_by:
        check_choice("group_by", key, KEYS)
    columns = [column_of(batch, key) for key in group_by]
    groups: dict[tuple, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
    sampled = batch.sampled().tolist()
    for call, trajectory in enumerate(batch.trajectories()):
        if sampled[call]:
            groups[tuple(column[call] for column in columns)][trajectory].append(call)
    for trajectories in groups.values():
        yield list(trajectories.values())
