"""The advantage of candidates: scores of siblings that answer one prompt, of which one was kept.

Invariant: only scores of candidates are compared, each of them once, and a candidate without a score is neither
compared nor counted. Scores that are all equal, and a score without another one to compare with, give exactly 0. Sums
are exact (`fsum`), so the order of the rows has no effect.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from recipe.dag.credit.group import EPS, all_equal
from recipe.dag.credit.options import check_choice
from recipe.dag.types.row import Candidate, Row

Slot = tuple[str, int, str, int, int]
"""Where candidates are siblings: uid, episode, node, turn, round."""


def candidate_advantages(
    rows: Sequence[Row], *, compare: str, scale: str, gamma: float, lam: float
) -> list[list[float]]:
    """Return one number per call of each row: its score minus the mean of the scores that it is compared with, its own
    included; 0 for calls of nodes without candidates.

    compare: `siblings`, or `sample`: all candidates of the agent in all episodes of the sample that have a row here.
    scale: `std` divides by their standard deviation (n - 1) plus EPS, `none` does not.
    gamma, lam: the scores are `shaped` first.
    """
    check_choice("compare", compare, ("siblings", "sample"))
    check_choice("scale", scale, ("std", "none"))
    # every candidate's row has the scores of all its siblings; keyed by slot, they are counted once
    slots: dict[Slot, tuple[Hashable, tuple[float | None, ...]]] = {}
    for row in rows:
        for slot, call in zip(_slots(row), row.calls, strict=True):
            if (candidate := call.candidate) is not None:
                group = slot if compare == "siblings" else (row.policy, row.uid, call.agent)
                slots[slot] = group, shaped(candidate.scores, candidate.parent, gamma=gamma, lam=lam)
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for group, scores in slots.values():
        groups[group] += [score for score in scores if score is not None]
    statistics = {group: _mean_and_deviation(scores, scale) for group, scores in groups.items()}
    return [
        [_advantage(slot, call.candidate, slots, statistics) for slot, call in zip(_slots(row), row.calls, strict=True)]
        for row in rows
    ]


def shaped(
    scores: Sequence[float | None], parent: float | None, *, gamma: float, lam: float
) -> tuple[float | None, ...]:
    """Return MARS2's scores of siblings: s + gamma (s - b) with the baseline b = (1 - lam) parent + lam (mean of the
    other siblings); of the two terms the one that exists, and s itself without either."""
    known = [score for score in scores if score is not None]
    total = math.fsum(known)

    def shape(score: float | None) -> float | None:
        if score is None:
            return None
        others = (total - score) / (len(known) - 1) if len(known) > 1 else None
        if others is None and parent is None:
            return score
        if others is None or parent is None:
            baseline = parent if others is None else others
            assert baseline is not None
        else:
            baseline = (1 - lam) * parent + lam * others
        return score + gamma * (score - baseline)

    return tuple(map(shape, scores)) if gamma else tuple(scores)


def _slots(row: Row) -> list[Slot]:
    return [(row.uid, row.episode, call.node, call.turn, call.round) for call in row.calls]


def _mean_and_deviation(scores: Sequence[float], scale: str) -> tuple[float, float] | None:
    """Return what is subtracted from a score and what divides it; None if there is nothing to compare."""
    if len(scores) < 2 or all_equal(scores):
        return None
    mean = math.fsum(scores) / len(scores)
    if scale == "none":
        return mean, 1.0
    return mean, math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) + EPS


def _advantage(
    slot: Slot,
    candidate: Candidate | None,
    slots: Mapping[Slot, tuple[Hashable, tuple[float | None, ...]]],
    statistics: Mapping[Hashable, tuple[float, float] | None],
) -> float:
    if candidate is None:
        return 0.0
    group, scores = slots[slot]
    score, compared = scores[candidate.index], statistics[group]
    return 0.0 if score is None or compared is None else (score - compared[0]) / compared[1]
