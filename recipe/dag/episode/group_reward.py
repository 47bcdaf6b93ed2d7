"""Scores groups: the reward nodes that need all episodes of a sample.

Invariant: a group is scored from what its episodes earned before, so scoring it again, with more episodes or after a
failure, gives what scoring it once would have given. An episode that failed is absent. A fault of the infrastructure is
retried and then fails all episodes of the group; it never becomes a reward.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from recipe.dag.core.errors import Fault, boundary
from recipe.dag.core.tasks import together
from recipe.dag.episode.failure import decide, describe, pause_s, run_error
from recipe.dag.types.record import Call, Episode
from recipe.dag.types.values import plain_copy
from recipe.dag.workflow.schema import EpisodeSpec

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Maximum number of groups that are scored at once; each may hold a thread."""
_SCORES = ("reward", "reward_parts", "unscored", "train")
"""The fields of a call that reward nodes change."""

Score = Callable[[Sequence[Episode]], Awaitable[None]]


async def score_groups(episodes: Iterable[Episode], score: Score, spec: EpisodeSpec) -> None:
    """Apply `score` to the finished episodes of each uid, in the order of their indices. Raises UserError if a group
    that fails ends the run."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.fault is None:
            groups.setdefault(episode.uid, []).append(episode)
    free = asyncio.Semaphore(AT_ONCE)

    async def score_one(group: list[Episode]) -> None:
        async with free:
            await _score_group(sorted(group, key=lambda episode: episode.index), score, spec)

    await together(map(score_one, groups.values()))


async def _score_group(group: list[Episode], score: Score, spec: EpisodeSpec) -> None:
    attempts = 0
    while True:
        attempts += 1
        for episode in group:
            _begin(episode)
        try:
            with boundary(Fault):
                await score(group)
            return
        except Fault as fault:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from fault
            record = fault.record()
            decision = decide(fault, spec, attempt=attempts)
            log.info("group %s attempt %s: %s: %s", group[0].uid, attempts, decision, describe(record))
            for episode in group:
                episode.faults.append(record)
            if decision == "fail":
                raise run_error(fault, f"group {group[0].uid}", spec) from fault
            if decision == "mask":
                for episode in group:
                    _begin(episode)
                    episode.fault = record
                return
            await asyncio.sleep(pause_s(attempts))


def _begin(episode: Episode) -> None:
    """Give the episode the scores that it had before its group was scored."""
    if episode.before_group is None:
        calls = [{name: plain_copy(getattr(call, name)) for name in _SCORES} for call in episode.calls]
        episode.before_group = {"outcome": episode.outcome, "info": plain_copy(episode.info), "calls": calls}
        return
    before = plain_copy(episode.before_group)
    episode.outcome, episode.info = before["outcome"], before["info"]
    for call, scores in zip(episode.calls, before["calls"], strict=True):
        _restore(call, scores)


def _restore(call: Call, scores: dict[str, Any]) -> None:
    for name in _SCORES:
        setattr(call, name, scores[name])
