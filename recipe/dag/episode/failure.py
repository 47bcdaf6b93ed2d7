"""What becomes of an episode that a fault ended.

Invariant: a decision looks at the fault and the workflow's policy alone, never at what the episode would have earned.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from recipe.dag.episode.record import Episode
from recipe.dag.errors import Fault

BACKOFF_S = 0.25
"""Before the second attempt, about; twice that before the third."""

Decision = Literal["retry", "mask", "fail"]


def decide(fault: Fault, on_failure: str, *, attempt: int, retries: int) -> Decision:
    """`attempt` counts from 1. Only what the infrastructure caused is tried again: a bug would show again.

    drop_group masks here too: which other episodes go with this one is known when rows are made.
    """
    if on_failure == "fail":
        return "fail"
    if on_failure == "retry" and fault.infra and attempt <= retries:
        return "retry"
    return "mask"


def pause_s(attempt: int) -> float:
    """How long to wait after a failed attempt (from 1): what is exhausted or starting again needs a moment, and not all
    episodes that failed at once should come back at once."""
    return BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)


def describe(record: dict) -> str:
    """One line from `Fault.record()`."""
    where = f" in {record['where']}" if record["where"] else ""
    return f"{record['boundary']} fault{where}: {' '.join(record['message'].split())}"


def most_common(episodes: Iterable[Episode]) -> str:
    """The fault that ended most of them, in one line."""
    counts = Counter(describe(episode.fault) for episode in episodes if episode.fault)
    text, count = counts.most_common(1)[0]
    return f"{text} ({count} of {counts.total()})"
