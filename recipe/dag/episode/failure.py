"""What becomes of an episode that a fault ended, and of a run that loses too many.

Invariant: a decision looks at the fault and the workflow's policy alone, never at what the episode would have earned.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from recipe.dag.episode.record import Episode
from recipe.dag.errors import Fault, UserError
from recipe.dag.workflow.schema import EpisodeSpec

BACKOFF_S = 0.25
"""Before the second attempt, about; twice that before the third."""

Decision = Literal["retry", "mask", "fail"]

BUGS = ("user_code", "engine")
"""Causes that come again however often the same episode is run."""
MIN_JUDGED = 16
"""Of fewer episodes, one that is lost is too large a share to say anything."""


def decide(fault: Fault, spec: EpisodeSpec, *, attempt: int) -> Decision:
    """`attempt` counts from 1. Only what the infrastructure caused is tried again: a bug would show again.

    drop_group masks here too: which other episodes go with this one is known when rows are made.
    """
    if spec.on_failure == "fail" or (fault.cause in BUGS and spec.on_user_error == "fail"):
        return "fail"
    if spec.on_failure == "retry" and fault.infra and attempt <= spec.retries:
        return "retry"
    return "mask"


def pause_s(attempt: int) -> float:
    """How long to wait after a failed attempt (from 1): what is exhausted or starting again needs a moment, and not all
    episodes that failed at once should come back at once."""
    return BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)


def run_error(fault: Fault, episode: str, spec: EpisodeSpec) -> UserError:
    """What a fault that `decide` lets end the run is reported as. `episode`: its name."""
    text = describe(fault.record())
    if spec.on_failure == "fail":
        return UserError(f"{episode}: {text} (on_failure: fail)")
    return UserError(
        f"{text} ({episode}); fix it, or set `episode: {{on_user_error: mask}}` to leave such episodes out"
    )


def describe(record: dict) -> str:
    """One line from `Fault.record()`, led by the line of the user's code where it is known."""
    where = f" in {record['where']}" if record["where"] else ""
    source = f"{record['source']}: " if record.get("source") else ""
    return f"{source}{record['boundary']} fault{where}: {' '.join(record['message'].split())}"


def most_frequent(records: Iterable[dict]) -> str:
    """The most frequent of `Fault.record()`s in one line; empty where there is none. Faults of one line of code, or of
    one node with one text, are the same."""
    counts: Counter[tuple[str, ...]] = Counter()
    texts: dict[tuple[str, ...], str] = {}
    for fault in records:
        key = (fault["boundary"], fault["where"], fault.get("source") or fault["message"])
        counts[key] += 1
        texts.setdefault(key, describe(fault))
    if not counts:
        return ""
    key, count = counts.most_common(1)[0]
    return f"{texts[key]} ({count} of {counts.total()})"


def check_masked(episodes: Sequence[Episode], spec: EpisodeSpec, title: str) -> None:
    """Raises UserError where every single episode failed, or of many a larger share than the workflow allows."""
    faults = [episode.fault for episode in episodes if episode.fault is not None]
    masked, total = len(faults), len(episodes)
    often = f"most often: {most_frequent(faults)}"
    if total and masked == total:
        raise UserError(f"{title}: all {total} episodes failed; {often}")
    if total >= MIN_JUDGED and masked > spec.max_masked * total:
        bound = f"more than `episode.max_masked` ({spec.max_masked:g}) allows"
        raise UserError(f"{title}: {masked} of {total} episodes failed, {bound}; {often}")
