"""Accuracy over several episodes per problem: the mean, pass@k, and two ways to count a problem as solved.

Invariant: an episode that was not graded does not count as wrong: it is excluded, and the estimate uses the remaining
ones. An episode with a fault is excluded, too, unless the caller counts it as not solved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean

from recipe.dag.types.record import Episode

SOLVED = 0.5
"""The lowest outcome that counts as correct."""


def outcomes_by_problem(episodes: Iterable[Episode], *, lost: bool = False) -> list[list[bool]]:
    """Return, per problem (`uid`) in order of first appearance, the outcomes of its graded episodes: True if solved.

    Problems without graded episodes are excluded. `lost`: include episodes with a fault, as not solved.
    """
    problems: dict[str, list[bool]] = {}
    for episode in episodes:
        if episode.fault is not None:
            if lost:
                problems.setdefault(episode.uid, []).append(False)
        elif episode.outcome is not None:
            problems.setdefault(episode.uid, []).append(episode.outcome >= SOLVED)
    return list(problems.values())


def estimate_pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n-c, k) / C(n, k): the probability that k of the n episodes, drawn
    without replacement, include a correct one. Raises ValueError unless 0 <= correct <= n and 1 <= k <= n."""
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {correct} correct among {n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def pass_at_k(problems: Sequence[Sequence[bool]], k: int) -> float:
    """Return the mean over problems with at least k graded episodes. Raises ValueError if there are none."""
    enough = [outcomes for outcomes in problems if len(outcomes) >= k]
    if not enough:
        raise ValueError(f"no problem has {k} graded episodes")
    return fmean(estimate_pass_at_k(len(outcomes), sum(outcomes), k) for outcomes in enough)


def average_at_n(problems: Sequence[Sequence[bool]]) -> float:
    """Return the mean over problems of the fraction of solved episodes. Raises ValueError without problems."""
    if not problems:
        raise ValueError("no problem was graded")
    return fmean(sum(outcomes) / len(outcomes) for outcomes in problems)


def majority_at_n(problems: Sequence[Sequence[bool]], n: int) -> float:
    """Return the share of problems that more than half of their n episodes solved. Only problems with n graded episodes
    count. Raises ValueError if there are none."""
    return _share_solved(problems, n, n // 2 + 1)


def atleast_k_at_n(problems: Sequence[Sequence[bool]], k: int, n: int) -> float:
    """Return the share of problems that at least k of their n episodes solved. Unlike pass@k, the unbiased estimate for
    k episodes, it falls as k grows, and k = 1 is pass@n. Only problems with n graded episodes count. Raises ValueError
    if there are none, and unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise ValueError(f"at least {k} of {n} episodes")
    return _share_solved(problems, n, k)


def _share_solved(problems: Sequence[Sequence[bool]], n: int, needed: int) -> float:
    complete = [outcomes for outcomes in problems if len(outcomes) == n]
    if not complete:
        raise ValueError(f"no problem has {n} graded episodes")
    return fmean(float(sum(outcomes) >= needed) for outcomes in complete)
