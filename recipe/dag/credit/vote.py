"""Majority votes: the winner, and what each ballot was worth.

Invariant: a ballot's worth is exact. Votes have no parameters, so the vote without a ballot costs a recount and no
model call. Worths need not add up to what the vote earned: when two of three agree, either of the two may be pivotal
and the third one not. None is an abstention: it counts for nobody and is worth 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from recipe.dag.credit.options import check_choice

TIES = ("first", "none")


def majority(ballots: Sequence[Hashable | None], ties: str = "first") -> Hashable | None:
    """The most frequent ballot. Among equally frequent ones, the one that was cast first (`ties="first"`), or nobody
    (`"none"`). None if nobody cast one."""
    check_choice("ties", ties, TIES)
    counts = Counter(ballot for ballot in ballots if ballot is not None)
    most = max(counts.values(), default=0)
    leaders = [ballot for ballot, count in counts.items() if count == most]
    return leaders[0] if leaders and (ties == "first" or len(leaders) == 1) else None


def marginals(
    ballots: Sequence[Hashable | None], worth: Mapping[Hashable, float], ties: str = "first"
) -> tuple[float, ...]:
    """Per ballot: what the vote earned with it, less what it would have earned without it (the difference reward of
    Wolpert and Tumer). `worth` is what the vote earns if a ballot wins; one that it does not name, and no winner, earn
    0. With 0/1 correctness the results are -1, 0 or 1."""
    earned = _earned(majority(ballots, ties), worth)
    without = (_earned(majority([*ballots[:i], *ballots[i + 1 :]], ties), worth) for i in range(len(ballots)))
    return tuple(earned - other for other in without)


def _earned(winner: Hashable | None, worth: Mapping[Hashable, float]) -> float:
    return 0.0 if winner is None else float(worth.get(winner, 0.0))
