"""Many episodes at once.

Invariant: the result's order and contents do not depend on which episode finishes first; an episode that hangs or fails
holds one place among those in flight and touches no other. When `run_batch` returns or raises, nothing of it runs any
more.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from recipe.dag.episode.record import Episode
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.stall import watched_loop
from recipe.dag.episode.tasks import together

GC_THRESHOLDS = 50_000, 50, 100
"""New objects before a collection, and collections of one generation before the next one's."""
_collector = threading.Lock()
_rollouts = 0
"""Under way in this process, on any loop."""
_before = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Keep the garbage collector from what exists already, and have it look at the rest less often. Records live until
    the step ends: to look through them every 700 objects, as Python does, doubles what a call costs at 4,096 episodes.
    """
    global _rollouts, _before
    with _collector:
        _rollouts += 1
        if _rollouts == 1:
            _before = gc.get_threshold()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        with _collector:
            _rollouts -= 1
            if _rollouts == 0:
                gc.set_threshold(*_before)
                gc.unfreeze()


async def run_batch(
    runner: EpisodeRunner, samples: Sequence[tuple[dict[str, Any], str]], n: int, *, step: int, **options: Any
) -> list[Episode]:
    """Return what `play_batch` does with these options. Raises UserError if too many failed, too."""
    episodes = await play_batch(runner, samples, n, step=step, **options)
    runner.check_masked(episodes, f"step {step}")
    return episodes


async def play_batch(
    runner: EpisodeRunner,
    samples: Sequence[tuple[dict[str, Any], str]],
    n: int,
    *,
    step: int,
    validate: bool = False,
    max_in_flight: int = 512,
    on_done: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """n episodes of each (sample, uid): all of the first sample, then all of the second. `on_done` is called on the
    loop as each one ends, in the order of time. Raises UserError for an error of the user's code."""
    places = asyncio.Semaphore(max_in_flight)

    async def one(sample: dict[str, Any], uid: str, index: int) -> Episode:
        async with places:
            episode = await runner.run(sample, uid, index, step=step, validate=validate)
        if on_done is not None:
            on_done(episode)
        return episode

    with watched_loop(), rare_collections():
        return await together(one(sample, uid, index) for sample, uid in samples for index in range(n))
