"""Watches whether a coach still measures what it should: its scores beside the outcomes, by kind of data.

Invariant: pure functions of sums over steps; the state is plain JSON, so a resumed run goes on with it. Scores and
outcomes are from 0 to 1.

A coach that grows kinder to one kind of task while its outcomes stay where they were teaches the agents to please it
(in the published runs regression tasks were scored 0.5 to 1.8 of 10 higher, and classification fell back to its
baseline).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recipe.dag.types.record import Episode

ALL = "all"
"""The data type of samples without `extra_info.data_type`."""
RISE = 0.05
"""The least rise of the mean score, between the two halves of the window, that may set off the alarm."""
SHARE = 0.25
"""The alarm needs an outcome that rose by less than this share of the score's rise."""
SIGMAS = 2.0
"""A rise must exceed so many standard errors."""
LEAST_STEPS = 4
"""Steps in the window before an alarm is possible."""

Key = tuple[str, str]
"""Agent and data type."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over the episodes of one step, or several, in which an agent was scored and the outcome is known."""

    count: int = 0
    score: float = 0.0
    outcome: float = 0.0
    score_score: float = 0.0
    outcome_outcome: float = 0.0
    score_outcome: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(left + right for left, right in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    @property
    def means(self) -> tuple[float, float]:
        """The mean score and the mean outcome; needs a count above 0."""
        return self.score / self.count, self.outcome / self.count

    @property
    def moments(self) -> tuple[float, float, float]:
        """The variances of score and outcome, and their covariance."""
        score, outcome = self.means
        return (
            max(self.score_score / self.count - score * score, 0.0),
            max(self.outcome_outcome / self.count - outcome * outcome, 0.0),
            self.score_outcome / self.count - score * outcome,
        )


def observe(episodes: Iterable[Episode]) -> dict[Key, Sums]:
    """Return the sums of a step's episodes, by agent and data type; an episode's score of an agent is the mean over its
    verdicts. Episodes with a fault or without an outcome do not count."""
    sums: dict[Key, Sums] = {}
    for episode in episodes:
        if episode.fault is not None or episode.outcome is None:
            continue
        outcome = episode.outcome
        for agent, score in _scores(episode):
            key = agent, data_type(episode)
            new = Sums(1, score, outcome, score * score, outcome * outcome, score * outcome)
            sums[key] = sums.get(key, Sums()) + new
    return sums


def _scores(episode: Episode) -> Iterator[tuple[str, float]]:
    for key, value in episode.info.items():
        if key.startswith("coach/") and key.endswith("/mean") and isinstance(value, int | float):
            yield key.removeprefix("coach/").removesuffix("/mean"), float(value)


def data_type(episode: Episode) -> str:
    """Return `extra_info.data_type` of the episode's sample, or ALL."""
    extra = episode.sample.get("extra_info")
    value = extra.get("data_type") if isinstance(extra, Mapping) else None
    return ALL if value is None or value == "" else str(value)


def correlation(sums: Sums) -> float | None:
    """Return Pearson's correlation of scores and outcomes; None where one of them does not vary."""
    if sums.count < 2:
        return None
    score_variance, outcome_variance, covariance = sums.moments
    if score_variance <= 1e-12 or outcome_variance <= 1e-12:
        return None
    return min(max(covariance / math.sqrt(score_variance * outcome_variance), -1.0), 1.0)


def divergence(steps: Sequence[Sums]) -> tuple[float, float] | None:
    """Return how far score and outcome rose from the older to the newer half of `steps`, if they diverge: the score
    rose (by RISE at least), the outcome did not (by less than SHARE of that), and neither the rise nor the difference
    is chance (SIGMAS). None otherwise."""
    if len(steps) < LEAST_STEPS:
        return None
    older, newer = _total(steps[: len(steps) // 2]), _total(steps[len(steps) // 2 :])
    (score_before, outcome_before), (score_now, outcome_now) = older.means, newer.means
    score_rise, outcome_rise = score_now - score_before, outcome_now - outcome_before
    if score_rise < RISE or outcome_rise >= SHARE * score_rise:
        return None
    score_error = difference_error = 0.0
    for half in (older, newer):
        score_variance, outcome_variance, covariance = half.moments
        score_error += score_variance / half.count
        difference_error += max(score_variance + outcome_variance - 2 * covariance, 0.0) / half.count
    is_chance = score_rise < SIGMAS * math.sqrt(score_error)
    is_chance |= score_rise - outcome_rise < SIGMAS * math.sqrt(difference_error)
    return None if is_chance else (score_rise, outcome_rise)


def _total(steps: Iterable[Sums]) -> Sums:
    return sum(steps, Sums())


class BiasMonitor:
    """The last steps of each agent and data type."""

    def __init__(self, window: int) -> None:
        """`window`: steps that correlation, gap and alarm cover; 0 switches the monitor off."""
        self._window = window
        self._steps: dict[Key, list[Sums]] = {}
        self._cooldown: dict[Key, int] = {}
        """Steps until the next alarm is possible: one alarm per window, since what it reports lasts that long."""
        self.alarms: list[str] = []
        """Lines to print about the latest step: one for each agent and data type that sets off the alarm."""

    def update(self, episodes: Iterable[Episode]) -> dict[str, float]:
        """Count a step; return `coach_bias/<agent>/<data_type>/...`: `score` and `outcome`, the step's means;
        `correlation` (absent where one of them does not vary) and `gap`, the mean score less the mean outcome, of the
        window."""
        self.alarms = []
        metrics: dict[str, float] = {}
        for key, sums in observe(episodes).items() if self._window else ():
            steps = self._steps.setdefault(key, [])
            steps.append(sums)
            del steps[: -self._window]
            total = _total(steps)
            score, outcome = total.means
            values = dict(zip(("score", "outcome"), sums.means, strict=True)) | {"gap": score - outcome}
            if (shared := correlation(total)) is not None:
                values["correlation"] = shared
            metrics |= {f"coach_bias/{'/'.join(key)}/{name}": value for name, value in values.items()}
            self._warn(key, divergence(steps), len(steps))
        return metrics

    def _warn(self, key: Key, rises: tuple[float, float] | None, steps: int) -> None:
        self._cooldown[key] = max(self._cooldown.get(key, 0) - 1, 0)
        if rises is not None and not self._cooldown[key]:
            self._cooldown[key] = self._window
            agent, kind = key
            self.alarms.append(
                f"coach bias: over the last {steps} steps with such tasks, the score of {agent} on {kind} rose by "
                f"{rises[0]:.2f}, its outcome by {rises[1]:+.2f}; read its verdicts in episodes.jsonl, and change the "
                "template or the coach"
            )

    def state(self) -> dict[str, Any]:
        return {
            "steps": [[*key, [list(asdict(sums).values()) for sums in steps]] for key, steps in self._steps.items()],
            "cooldown": [[*key, steps] for key, steps in self._cooldown.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; {} is a new monitor."""
        self._steps = {
            (agent, kind): [Sums(*values) for values in steps[-self._window :]] if self._window else []
            for agent, kind, steps in state.get("steps", ())
        }
        self._cooldown = {(agent, kind): steps for agent, kind, steps in state.get("cooldown", ())}
