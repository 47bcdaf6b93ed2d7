"""Accuracy over several episodes per problem.

Invariant: an episode that was not graded is no wrong answer: it is left out, and the estimate rests on the ones that
remain. One that a fault ended is left out, too, unless it is asked for as not solved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean

from recipe.dag.episode.record import Episode

SOLVED = 0.5
"""An outcome from here on counts as correct."""


def outcomes_by_problem(episodes: Iterable[Episode], *, lost: bool = False) -> list[list[bool]]:
    """Per problem (`uid`), in order of first appearance: whether each graded episode solved it. Problems without one
    are left out. `lost`: with the episodes that a fault ended, as not solved."""
    problems: dict[str, list[bool]] = {}
    for episode in episodes:
        if episode.fault is not None:
            if lost:
                problems.setdefault(episode.uid, []).append(False)
        elif episode.outcome is not None:
            problems.setdefault(episode.uid, []).append(episode.outcome >= SOLVED)
    return list(problems.values())


def estimate_pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of the n episodes, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k).
    Unbiased. Raises ValueError unless 0 <= correct <= n and 1 <= k <= n."""
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {correct} correct among {n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def pass_at_k(problems: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over the problems that have at least k graded episodes. Raises ValueError if none has."""
    enough = [outcomes for outcomes in problems if len(outcomes) >= k]
    if not enough:
        raise ValueError(f"no problem has {k} graded episodes")
    return fmean(estimate_pass_at_k(len(outcomes), sum(outcomes), k) for outcomes in enough)


def average_at_n(problems: Sequence[Sequence[bool]]) -> float:
    """Mean over problems of the share of their episodes that solved them. Raises ValueError without problems."""
    if not problems:
        raise ValueError("no problem was graded")
    return fmean(sum(outcomes) / len(outcomes) for outcomes in problems)
