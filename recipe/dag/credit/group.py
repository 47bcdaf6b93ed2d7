"""Group-relative advantages: GRPO, its leave-one-out form (RLOO) and its unscaled form.

Invariant: a unit is compared with the units of its own group only. A group of one unit, and a group whose units all
earned the same, give an advantage of exactly 0: there is nothing to learn from them. Sums are exact (`fsum`), so the
order of the rows has no effect on the statistics.

What the field calls MAGRPO, AT-GRPO, Dr.MAS, RLOO or M-GRPO are options of the one function here; the table of them is
`recipe.dag.algorithms`. `group_by=("uid",)` is plain GRPO that pools all agents of the policy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.options import check_choice, check_units

KEYS = ("uid", "agent", "role", "turn", "round", "node", "branch", "prompt_hash")
PLURAL = {"turn": "turns", "round": "rounds", "branch": "branches"}
SAME = 1e-12
"""Spread, relative or absolute, within which rewards count as equal: sums of equal parts differ by rounding alone."""


def group_relative(
    batch: CreditBatch,
    credits: Sequence[float] | None = None,
    *,
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "call",
    center: str = "mean",
    scale: str = "std",
    gamma_turn: float | None = None,
    same_prompt: bool = False,
    eps: float = 1e-6,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    `stat_unit="trajectory"`: a unit is one episode's calls within the group, worth the sum of their rewards; each of
    them gets the unit's advantage. `scale="std"` divides by the sample standard deviation (n - 1) plus `eps`.
    `gamma_turn`: a call is worth its own reward and the later ones of its agent at its node in the episode, discounted
    once per call; None: its own. The return of a token is what its unit earned. A call without sampled tokens counts in
    the statistics. Raises ValueError for an unknown option, for a merged row that does not name the turns or rounds by
    which it is to be grouped or ordered, and, with `same_prompt` (a tree of alternatives), for a group whose members
    answered different prompts. `credits`: per call, what is added to it without being centred, because it has a
    baseline of its own already; both are divided by the root mean square of their sum.
    """
    check_choice("center", center, ("mean", "leave_one_out"))
    check_choice("scale", scale, ("std", "none"))
    rewards = batch.rewards.tolist() if gamma_turn is None else _to_go(batch, stat_unit, gamma_turn)
    advantages, returns = [0.0] * len(batch.uid), [0.0] * len(batch.uid)
    for units, values in _groups(batch, group_by, stat_unit, rewards):
        if same_prompt:
            _check_prompts(batch, units)
        beside = [math.fsum(credits[call] for call in unit) for unit in units] if credits is not None else None
        for unit, value, advantage in zip(units, values, _relative(values, center, scale, eps, beside), strict=True):
            for call in unit:
                advantages[call], returns[call] = advantage, value
    spread = (batch.spread(torch.tensor(column, dtype=torch.float32)) for column in (advantages, returns))
    return tuple(map(batch.per_row, spread))


def zero_variance(
    batch: CreditBatch,
    *,
    group_by: Sequence[str] = ("uid", "agent"),
    stat_unit: str = "call",
    gamma_turn: float | None = None,
    rewards: Sequence[float] | None = None,
) -> list[bool]:
    """Per row: True if none of its calls can carry a gradient, because their groups earned one and the same. A row that
    merges calls of several groups is False as soon as one of them has something to compare. `rewards`: per call, in
    place of the batch's."""
    flat = [True] * len(batch.row_lengths)
    if rewards is None:
        rewards = batch.rewards.tolist() if gamma_turn is None else _to_go(batch, stat_unit, gamma_turn)
    for units, values in _groups(batch, group_by, stat_unit, rewards):
        if not _all_same(values):
            for call in (call for unit in units for call in unit):
                flat[batch.row_of_call[call]] = False
    return flat


def _relative(
    values: list[float], center: str, scale: str, eps: float, beside: list[float] | None = None
) -> list[float]:
    count = len(values)
    same = _all_same(values)
    if count == 1 or same and beside is None:
        return [0.0] * count
    mean = math.fsum(values) / count
    centred = [0.0 if same else value - mean for value in values]
    beside = beside or [0.0] * count
    away = [c + b for c, b in zip(centred, beside, strict=True)]
    spread = math.sqrt(math.fsum(a * a for a in away) / (count - 1)) + eps if scale == "std" else 1.0
    # x - mean(others) = n / (n - 1) * (x - mean)
    factor = count / (count - 1) if center == "leave_one_out" else 1.0
    return [(factor * c + b) / spread for c, b in zip(centred, beside, strict=True)]


def _all_same(values: list[float]) -> bool:
    return math.isclose(min(values), max(values), rel_tol=SAME, abs_tol=SAME)


def compared(
    batch: CreditBatch,
    rewards: Sequence[float],
    *,
    group_by: Sequence[str],
    stat_unit: str,
    scale: str = "none",
    eps: float = 0.0,
) -> tuple[list[float], list[float]]:
    """(how far each call's unit is from its group's mean, what it earned), per call; `rewards`: per call."""
    away, earned = [0.0] * len(batch.uid), [0.0] * len(batch.uid)
    for units, values in _groups(batch, group_by, stat_unit, rewards):
        for unit, value, distance in zip(units, values, _relative(values, "mean", scale, eps), strict=True):
            for call in unit:
                away[call], earned[call] = distance, value
    return away, earned


def _groups(
    batch: CreditBatch, group_by: Sequence[str], stat_unit: str, rewards: Sequence[float]
) -> Iterator[tuple[list[list[int]], list[float]]]:
    """Per group: its units, each a list of indices into the batch's columns, and what each unit earned."""
    check_choice("stat_unit", stat_unit, ("call", "trajectory"))
    columns = [_column(batch, key) for key in group_by]
    groups: dict[tuple, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for call, trajectory in enumerate(zip(batch.uid, batch.episode, strict=True)):
        group = tuple(column[call] for column in columns)
        groups[group][call if stat_unit == "call" else trajectory].append(call)
    for units in groups.values():
        yield list(units.values()), [math.fsum(rewards[call] for call in calls) for calls in units.values()]


def _column(batch: CreditBatch, key: str) -> Sequence:
    check_choice("group_by", key, KEYS)
    column = getattr(batch, key)
    if column is None:
        raise ValueError("prompts were not hashed; make the batch with `from_rows(rows, prompts=True)`")
    if None in column:
        raise ValueError(
            f"{batch.where(column.index(None))} does not name its calls' {PLURAL[key]} (call_{PLURAL[key]}), which "
            "are needed to group or order them"
        )
    return column


def _to_go(batch: CreditBatch, stat_unit: str, gamma: float) -> list[float]:
    """Per call: its reward and the later ones of its agent at its node in the episode, discounted once per call."""
    check_units(gamma_turn=gamma)
    if stat_unit != "call":
        raise ValueError("gamma_turn: a trajectory is worth the sum of its rewards already; needs stat_unit call")
    turns, rounds = _column(batch, "turn"), _column(batch, "round")
    streams: dict[tuple, list[int]] = defaultdict(list)
    for call, stream in enumerate(zip(batch.uid, batch.episode, batch.agent, batch.node, strict=True)):
        streams[stream].append(call)
    worth = batch.rewards.tolist()
    for calls in streams.values():
        calls.sort(key=lambda call: (turns[call], rounds[call]))
        for call, following in zip(reversed(calls[:-1]), reversed(calls[1:]), strict=True):
            worth[call] += gamma * worth[following]
    return worth


def _check_prompts(batch: CreditBatch, units: Sequence[Sequence[int]]) -> None:
    prompts = _column(batch, "prompt_hash")
    calls = [call for unit in units for call in unit]
    for call in calls[1:]:
        if prompts[call] != prompts[calls[0]]:
            raise ValueError(
                f"{batch.where(call)} answered another prompt than {batch.where(calls[0])}, though both are "
                "alternatives in one group"
            )
