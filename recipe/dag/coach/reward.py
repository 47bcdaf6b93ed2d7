"""Turns the verdicts of coaches into rewards.

Invariant: only this module divides by the scale. A call without a readable verdict gets None, never a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from recipe.dag.core.errors import RewardFault
from recipe.dag.types.record import Call, Episode
from recipe.dag.types.values import as_number

Weight = float | Mapping[str, float]


class Judgement(NamedTuple):
    """A call of a judged node and what its coach said of it."""

    call: Call
    process: float | None
    """The score as a share of the scale, from 0 to 1; None if it could not be read."""
    outcome: float | None
    """From 0 to 1; None if it could not be read."""
    superseded: bool = False
    """The coach is behind the loop, and its verdict belongs to a later call of the turn."""


def coach_scores(
    episode: Episode, *, coaches: Mapping[str, str], scale: float = 10.0, process: Weight = 1.0, outcome: Weight = 0.0
) -> dict[str, list[float | None]]:
    """Return `process * PROCESS_SCORE / scale + outcome * OUTCOME_SCORE` for each call of the judged nodes; None if its
    verdict lacks one of the two that count.

    A verdict belongs to the call of its turn and round. A coach behind the loop of its node judges once per turn: its
    verdict belongs to the node's last call, and the earlier ones of the turn get 0.0. The rewards of several coaches of
    one node are added.

    `episode.info` gets `coach/<agent>/mean` (of PROCESS_SCORE / scale), `/count` (verdicts) and `/failed`
    (calls without one that can be scored).

    coaches: coach's node id -> judged node id.
    scale: the highest PROCESS_SCORE of the templates.
    process, outcome: weights, one for all coaches or by coach's node id; with 0, a verdict need not have the value.
    """
    rewards: dict[int, float | None] = {}
    scores: dict[str, list[float | None]] = {}
    for coach, judged in coaches.items():
        weights = _weight(process, coach, "process"), _weight(outcome, coach, "outcome")
        for judgement in judgements(episode.calls, coach, judged, scale):
            key, reward = id(judgement.call), _reward(judgement, *weights)
            earlier = rewards.get(key, 0.0)
            rewards[key] = None if reward is None or earlier is None else earlier + reward
            if not judgement.superseded:
                # a verdict that lacks what counts is as good as none
                scores.setdefault(judgement.call.agent, []).append(None if reward is None else judgement.process)
    for agent, judged_scores in scores.items():
        read = [score for score in judged_scores if score is not None]
        episode.info |= {f"coach/{agent}/mean": fmean(read)} if read else {}
        episode.info |= {f"coach/{agent}/count": len(read), f"coach/{agent}/failed": len(judged_scores) - len(read)}
    return {agent: [rewards.get(id(call), 0.0) for call in episode.calls_of(agent)] for agent in scores}


def judgements(calls: Sequence[Call], coach: str, judged: str, scale: float) -> Iterator[Judgement]:
    """Yield a judgement for each call of the node `judged`. Raises RewardFault for a score beyond the scale."""
    verdict_of: dict[int, Call] = {}
    superseded: set[int] = set()
    for position, verdict in enumerate(calls):
        earlier = [call for call in calls[:position] if call.node == judged and call.turn == verdict.turn]
        # a judged node that was skipped in this round of its loop has no call of this round
        if verdict.node != coach or not earlier or earlier[-1].round < verdict.round:
            continue
        verdict_of[id(earlier[-1])] = verdict
        if earlier[-1].round > verdict.round:
            superseded |= {id(call) for call in earlier[:-1]}
    for call in calls:
        if call.node != judged:
            continue
        verdict = verdict_of.get(id(call))
        parsed = {} if verdict is None or "failed" in verdict.parsed else verdict.parsed
        score = _in_range(parsed.get("process"), scale, "PROCESS_SCORE")
        outcome = _in_range(parsed.get("outcome"), 1.0, "OUTCOME_SCORE")
        yield Judgement(call, None if score is None else score / scale, outcome, id(call) in superseded)


def _reward(judgement: Judgement, process: float, outcome: float) -> float | None:
    if judgement.superseded:
        return 0.0
    terms = [(process, judgement.process), (outcome, judgement.outcome)]
    counted = [(weight, value) for weight, value in terms if weight]
    if not counted or any(value is None for _, value in counted):
        return None if counted else 0.0
    return sum(weight * value for weight, value in counted if value is not None)


def _in_range(value: Any, largest: float, what: str) -> float | None:
    number = None if value is None else as_number(value)
    if value is not None and (number is None or not 0.0 <= number <= largest):
        raise RewardFault(f"a {what} of {value!r} is not between 0 and {largest:g}; is `scale` that of the template?")
    return number


def _weight(weight: Weight, coach: str, name: str) -> float:
    if not isinstance(weight, Mapping):
        return weight
    if coach not in weight:
        raise RewardFault(f"`{name}` has no weight for coach {coach}")
    return weight[coach]
