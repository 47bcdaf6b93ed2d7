"""Decides what happens to an episode that a fault ended, and when a run has lost too many.

Invariant: a decision depends on the fault and the workflow's settings alone, never on the reward that the episode would
have got.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from recipe.dag.core.errors import Fault, UserError
from recipe.dag.types.record import Episode
from recipe.dag.workflow.schema import EpisodeSpec

BACKOFF_S = 0.25
"""Approximate pause before the second attempt; it doubles before each further one."""

Decision = Literal["retry", "mask", "fail"]

BUGS = ("user_code", "engine")
"""Causes that recur however often the same episode is repeated."""
NO_ROOM = "its prompt does not fit into the context"
"""Why a call with `on_failure: skip` failed whose model was not asked."""
MIN_JUDGED = 16
"""With fewer episodes, the share of failed ones says too little."""


def decide(fault: Fault, spec: EpisodeSpec, *, attempt: int) -> Decision:
    """Return what to do after a fault. `attempt` counts from 1. Only faults of the infrastructure are retried: a bug
    would recur.

    drop_group also returns mask: the rest of the group is dropped when rows are made.
    """
    if spec.on_failure == "fail" or (fault.cause in BUGS and spec.on_user_error == "fail"):
        return "fail"
    if spec.on_failure == "retry" and fault.infra and attempt <= spec.retries:
        return "retry"
    return "mask"


def pause_s(attempt: int) -> float:
    """Return the pause in seconds after a failed attempt (from 1). A server that is overloaded or restarting needs a
    moment; the random factor keeps episodes that failed together from returning together."""
    return BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)


def run_error(fault: Fault, episode: str, spec: EpisodeSpec) -> UserError:
    """Return the error for a fault that ends the run. `episode`: the episode's name."""
    text = describe(fault.record())
    if spec.on_failure == "fail":
        return UserError(f"{episode}: {text} (on_failure: fail)")
    return UserError(f"{text} ({episode}); fix it, or set `episode: {{on_user_error: mask}}` to exclude such episodes")


def describe(record: dict) -> str:
    """Return `Fault.record()` as one line, which begins with the line of the user's code if it is known."""
    where = f" in {record['where']}" if record["where"] else ""
    source = f"{record['source']}: " if record.get("source") else ""
    return f"{source}{record['boundary']} fault{where}: {' '.join(record['message'].split())}"


def most_frequent(records: Iterable[dict]) -> str:
    """Return the most frequent of several `Fault.record()`s as one line, empty if there is none. Faults count as the
    same if they come from the same line of code, or from the same node with the same text."""
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


class TooManyFailed(UserError):
    """All episodes of a batch have ended, too many of them with a fault."""


def check_masked(episodes: Sequence[Episode], spec: EpisodeSpec, title: str) -> None:
    """Raise TooManyFailed if all episodes failed or, given at least MIN_JUDGED, a larger share than the workflow
    allows."""
    faults = [episode.fault for episode in episodes if episode.fault is not None]
    masked, total = len(faults), len(episodes)
    example = f"most often: {most_frequent(faults)}"
    if total and masked == total:
        raise TooManyFailed(f"{title}: {'the episode' if total == 1 else f'all {total} episodes'} failed; {example}")
    if total >= MIN_JUDGED and masked > spec.max_masked * total:
        bound = f"more than `episode.max_masked` ({spec.max_masked:g}) allows"
        raise TooManyFailed(f"{title}: {masked} of {total} episodes failed, {bound}; {example}")
