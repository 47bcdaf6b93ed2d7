"""Runs many episodes concurrently.

Invariant: the order and contents of the result do not depend on which episode finishes first; an episode that hangs or
fails occupies one of the places in flight and affects no other episode. When `run_batch` returns or raises, nothing
that it started is still running.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from recipe.dag.core.tasks import together
from recipe.dag.episode.event_loops import watched
from recipe.dag.episode.fork import Fork
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.types.record import Episode

GC_THRESHOLDS = 50_000, 50, 100
"""New objects before a collection, and collections of one generation before one of the next generation."""
_collector_lock = threading.Lock()
_active_batches = 0
"""In this process, on any loop."""
_usual_thresholds = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collection and collect the rest less often.

    Records live until the step ends. Searching them every 700 new objects, Python's default, doubles the cost of a call
    at 4,096 episodes.
    """
    global _active_batches, _usual_thresholds
    with _collector_lock:
        _active_batches += 1
        if _active_batches == 1:
            _usual_thresholds = gc.get_threshold()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        with _collector_lock:
            _active_batches -= 1
            if _active_batches == 0:
                gc.set_threshold(*_usual_thresholds)
                gc.unfreeze()


async def run_batch(
    runner: EpisodeRunner,
    samples: Sequence[tuple[dict[str, Any], str]],
    n: int,
    *,
    step: int,
    earlier: Sequence[Episode] = (),
    **options: Any,
) -> list[Episode]:
    """Return the episodes of `play_batch`, with their groups scored. `earlier`: episodes that have been run already and
    are left out; their groups are scored with them. Raises UserError, and TooManyFailed if too many failed."""
    episodes = await play_batch(runner, samples, n, step=step, skip=keys_of(earlier), **options)
    await runner.finish(episodes, f"step {step}", earlier=earlier)
    return episodes


def keys_of(episodes: Iterable[Episode]) -> set[tuple[str, int]]:
    return {(episode.uid, episode.index) for episode in episodes}


async def play_batch(
    runner: EpisodeRunner,
    samples: Sequence[tuple[dict[str, Any], str]],
    n: int,
    *,
    step: int,
    validate: bool = False,
    forked: Collection[str] = (),
    max_in_flight: int = 512,
    skip: Collection[tuple[str, int]] = (),
    on_done: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Return n episodes of each (sample, uid): all of the first sample, then all of the second. `forked`: behind each
    episode `index` its forks that the algorithm asks for at calls of these policies, with the indices index + n,
    index + 2n, and so on. `on_done` is called on the loop for each fork when it has ended, and for each episode when
    its forks have, too. Episodes whose (uid, index) is in `skip` are left out. Raises UserError for an error of the
    user's code."""
    in_flight = asyncio.Semaphore(max_in_flight)

    async def run_all(sample: dict[str, Any], uid: str, index: int) -> list[Episode]:
        async def run_one(number: int, fork: Fork | None = None) -> Episode:
            async with in_flight:
                episode = await runner.run(sample, uid, index + n * number, step=step, validate=validate, fork=fork)
            if on_done is not None and fork is not None:
                on_done(episode)
            return episode

        trunk = await run_one(0)
        forks = runner.forks_of(trunk, step=step, policies=forked) if forked else []
        episodes = [trunk, *await together(run_one(number, fork) for number, fork in enumerate(forks, 1))]
        if on_done is not None:  # after the forks, since a worker ships what has ended, and the forks repeat it
            on_done(trunk)
        return episodes

    with watched(asyncio.get_running_loop(), "all episodes"), rare_collections():
        todo = [(sample, uid, index) for sample, uid in samples for index in range(n) if (uid, index) not in skip]
        return list(chain.from_iterable(await together(run_all(*episode) for episode in todo)))
