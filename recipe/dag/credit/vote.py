"""Majority votes: the winner, and what each ballot was worth.

Invariant: a ballot's worth is exact. Votes have no parameters, so the vote without a ballot costs a recount and no
model call. Worths need not add up to what the vote earned: when two of three agree, either of the two may be pivotal
and the third one not. None is an abstention: it counts for nobody and is worth 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Contribution:
    """How much better the team did with an agent than without it, over the episodes in which both are known."""

    mean: float
    standard_error: float
    """Of the mean over episodes, which are taken as independent; nan for one episode."""
    episodes: int


def leave_one_agent_out(
    whole: Sequence[float], without: Mapping[str, Sequence[float | None]]
) -> dict[str, Contribution]:
    """Per agent: the mean over episodes of `whole[e] - without[agent][e]`. None: not known for this episode (the agent
    took no part in it); an agent with no known episode is left out. Raises ValueError if the lengths differ."""
    report = {}
    for agent, outcomes in without.items():
        if len(outcomes) != len(whole):
            raise ValueError(f"agent {agent}: {len(outcomes)} outcomes without it, but {len(whole)} episodes")
        gains = [all_in - other for all_in, other in zip(whole, outcomes, strict=True) if other is not None]
        if gains:
            mean = math.fsum(gains) / len(gains)
            squares = math.fsum((gain - mean) ** 2 for gain in gains)
            error = math.sqrt(squares / (len(gains) - 1) / len(gains)) if len(gains) > 1 else math.nan
            report[agent] = Contribution(mean, error, len(gains))
    return report


def vote_report(
    ballots: Sequence[Mapping[str, Hashable | None]], worths: Sequence[Mapping[Hashable, float]], ties: str = "first"
) -> dict[str, Contribution]:
    """leave_one_agent_out of votes: per episode the ballot of each agent, in the order in which they count, and what
    each answer is worth."""
    agents = dict.fromkeys(agent for cast in ballots for agent in cast)
    whole = [_earned(majority(list(cast.values()), ties), worth) for cast, worth in zip(ballots, worths, strict=True)]
    without: dict[str, list[float | None]] = {agent: [] for agent in agents}
    for cast, worth in zip(ballots, worths, strict=True):
        for agent in agents:
            rest = [ballot for other, ballot in cast.items() if other != agent]
            without[agent].append(_earned(majority(rest, ties), worth) if agent in cast else None)
    return leave_one_agent_out(whole, without)
