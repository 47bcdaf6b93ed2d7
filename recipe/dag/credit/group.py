"""Group-relative advantages: GRPO, its leave-one-out form (RLOO), its unscaled form and MAGRPO.

Invariant: the calls of an agent in an episode are its trajectory, and a trajectory counts once in its group's mean and
deviation, however many calls it has. A group of one trajectory, and a group whose calls all have the same return, have
advantages of exactly 0. Sums are exact (`fsum`), so the order of the rows has no effect on the statistics.

Why once: where an agent decides how long it talks, a baseline that counts calls depends on that decision, and the
gradient then prefers long or short episodes whatever they earn (the stopping game of docs/credit.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.options import check_choice
from recipe.dag.credit.returns import call_returns

KEYS = ("uid", "agent", "role", "turn", "round", "node", "branch", "prompt_hash", "trunk")
SAME = 1e-12
"""Difference, relative or absolute, up to which returns count as equal: sums of equal parts differ by rounding."""
EPS = 1e-6
"""Added to the standard deviation that is divided by, as in verl's GRPO."""

GroupValues = list[list[float]]
"""Numbers of one group: per trajectory, one per call."""


def group_relative(
    batch: CreditBatch,
    precentered: Sequence[float] | None = None,
    *,
    group_by: Sequence[str],
    stat_unit: str,
    center: str,
    scale: str,
    gamma_turn: float | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    The return of a token is that of its call (`stat_unit` and `gamma_turn` as in `call_returns`). Its advantage is

        A = (R - mean(R)) / (std(R) + EPS)

    over the group's n trajectories, with the sample standard deviation (n - 1). `center="leave_one_out"` subtracts the
    mean of the other trajectories, `scale="none"` does not divide. A call without sampled tokens contributes to the
    return of its trajectory and is not compared. `precentered` [C]: advantages that have a baseline already; they are
    added to R - mean(R), and the root mean square of the sum (n - 1) takes the place of std(R). Raises ValueError for
    an unknown option.
    """
    check_choice("center", center, ("mean", "leave_one_out"))
    check_choice("scale", scale, ("std", "none"))
    returns = call_returns(batch, batch.rewards.tolist(), stat_unit, gamma_turn)
    advantages = _advantages(batch, returns, group_by, center=center, scale=scale, eps=EPS, precentered=precentered)
    advantages_C, returns_C = (torch.tensor(column, dtype=torch.float32) for column in (advantages, returns))
    return batch.broadcast_to_rows(advantages_C), batch.broadcast_to_rows(returns_C)


def zero_variance(
    batch: CreditBatch,
    *,
    group_by: Sequence[str],
    stat_unit: str,
    gamma_turn: float | None,
    rewards: Sequence[float] | None = None,
) -> list[bool]:
    """Return [C] bool: True if the call can carry no gradient, because all returns of its group are equal. `rewards`
    [C] replace those of the batch."""
    without_gradient = [True] * len(batch.uid)
    rewards = batch.rewards.tolist() if rewards is None else rewards
    returns = call_returns(batch, rewards, stat_unit, gamma_turn)
    for trajectories in _groups(batch, group_by):
        calls = [call for trajectory in trajectories for call in trajectory]
        if not all_equal([returns[call] for call in calls]):
            for call in calls:
                without_gradient[call] = False
    return without_gradient


def mean_outside(
    batch: CreditBatch,
    bounds: tuple[float, float],
    *,
    group_by: Sequence[str],
    stat_unit: str,
    gamma_turn: float | None,
) -> list[bool]:
    """Return [C] bool: True if the mean return of the call's group is not strictly between `bounds`.

    The mean is over the group's trajectories, each by the mean of its calls, so that a trajectory with more calls does
    not count more."""
    low, high = bounds
    outside = [True] * len(batch.uid)
    returns = call_returns(batch, batch.rewards.tolist(), stat_unit, gamma_turn)
    for trajectories in _groups(batch, group_by):
        means = [math.fsum(returns[call] for call in calls) / len(calls) for calls in trajectories]
        mean = math.fsum(means) / len(means)
        if low < mean < high:
            for call in (call for trajectory in trajectories for call in trajectory):
                outside[call] = False
    return outside


def center_by_group(
    batch: CreditBatch,
    rewards: Sequence[float],
    *,
    group_by: Sequence[str],
    stat_unit: str,
    gamma_turn: float | None,
    scale: str,
) -> tuple[list[float], list[float]]:
    """Return (centered, returns), each [C]: the return of each call for these `rewards` [C], and its distance to the
    mean of its group, with `scale="std"` divided by the group's standard deviation."""
    returns = call_returns(batch, rewards, stat_unit, gamma_turn)
    return _advantages(batch, returns, group_by, center="mean", scale=scale, eps=0.0), returns


def _advantages(
    batch: CreditBatch,
    returns: Sequence[float],
    group_by: Sequence[str],
    *,
    center: str,
    scale: str,
    eps: float,
    precentered: Sequence[float] | None = None,
) -> list[float]:
    """Return [C] advantages; 0 for calls without sampled tokens."""
    advantages = [0.0] * len(returns)
    for trajectories in _groups(batch, group_by):
        group_returns = [[returns[call] for call in calls] for calls in trajectories]
        group_credits = None
        if precentered is not None:
            group_credits = [[precentered[call] for call in calls] for calls in trajectories]
        relative = _relative(group_returns, center, scale, eps, group_credits)
        for calls, call_advantages in zip(trajectories, relative, strict=True):
            for call, advantage in zip(calls, call_advantages, strict=True):
                advantages[call] = advantage
    return advantages


def _relative(
    returns: GroupValues, center: str, scale: str, eps: float, precentered: GroupValues | None
) -> GroupValues:
    """Return the advantages of one group."""
    count = len(returns)
    # dividing the rounding errors of equal returns by their deviation would make advantages of them
    equal = all_equal([value for trajectory in returns for value in trajectory])
    if count == 1 or (equal and precentered is None):
        return [[0.0] * len(trajectory) for trajectory in returns]
    # each trajectory counts once: the mean over trajectories of the mean over its calls
    means = [_mean(trajectory) for trajectory in returns]
    mean = _mean(means)
    precentered = precentered or [[0.0] * len(trajectory) for trajectory in returns]
    centered = [
        [(0.0 if equal else value - mean) + credit for value, credit in zip(trajectory, call_credits, strict=True)]
        for trajectory, call_credits in zip(returns, precentered, strict=True)
    ]
    deviation = 1.0
    if scale == "std":
        squares = [_mean([distance**2 for distance in trajectory]) for trajectory in centered]
        deviation = math.sqrt(math.fsum(squares) / (count - 1)) + eps
    shifts = [0.0] * count
    if center == "leave_one_out" and not equal:
        # R - mean of the others = R - mean + (mean of its own trajectory - mean) / (n - 1)
        shifts = [(own - mean) / (count - 1) for own in means]
    return [
        [(distance + shift) / deviation for distance in trajectory]
        for trajectory, shift in zip(centered, shifts, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def all_equal(values: Collection[float]) -> bool:
    """Return whether no two of the values, of which there is at least one, differ by more than SAME."""
    return math.isclose(min(values), max(values), rel_tol=SAME, abs_tol=SAME)


def _groups(batch: CreditBatch, group_by: Sequence[str]) -> Iterator[list[list[int]]]:
    """Yield each group as its trajectories, each a list of the sampled calls that it has in the group."""
    for key in group_by:
        check_choice("group_by", key, KEYS)
    if "prompt_hash" in group_by and batch.prompt_hash is None:
        raise ValueError("prompts were not hashed; make the batch with `from_rows(rows, prompts=True)`")
    columns = [getattr(batch, key) for key in group_by]
    groups: dict[tuple, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
    sampled = batch.sampled().tolist()
    for call, trajectory in enumerate(batch.trajectories()):
        # a call that sampled nothing has no token whose probability an advantage could change
        if sampled[call]:
            groups[tuple(column[call] for column in columns)][trajectory].append(call)
    for trajectories in groups.values():
        yield list(trajectories.values())
