"""Many episodes at once.

Invariant: the result's order and contents do not depend on which episode finishes first; an episode that hangs or fails
holds one place among those in flight and touches no other. When `run_batch` returns or raises, nothing of it runs any
more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from recipe.dag.episode.record import Episode
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.stall import watched_loop
from recipe.dag.episode.tasks import together


async def run_batch(
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
    loop as each one ends, in the order of time. Raises UserError if too many failed."""
    places = asyncio.Semaphore(max_in_flight)

    async def one(sample: dict[str, Any], uid: str, index: int) -> Episode:
        async with places:
            episode = await runner.run(sample, uid, index, step=step, validate=validate)
        if on_done is not None:
            on_done(episode)
        return episode

    with watched_loop():
        episodes = await together(one(sample, uid, index) for sample, uid in samples for index in range(n))
    runner.check_masked(episodes, f"step {step}")
    return episodes
