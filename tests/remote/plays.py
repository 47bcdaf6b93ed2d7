"""Episodes of policies behind an API."""

from __future__ import annotations

import asyncio

from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.remote.connect import Remotes
from recipe.dag.types.record import Episode


def play(
    world, workflow, tools=(), *, n: int = 1, seed: int = 0, validate: bool = False, check: bool = False
) -> list[Episode]:
    """Play an episode of each of `n` samples, all at once; `check`: ask the servers first whether they are there."""

    async def main():
        remotes = Remotes(workflow)
        if check:
            await remotes.check()
        runner = EpisodeRunner(workflow, remotes.endpoints, {tool.name: tool for tool in tools}, seed=seed)
        try:
            runs = (runner.run(world.sample(), f"u{k}", 0, step=0, validate=validate) for k in range(n))
            return await asyncio.gather(*runs)
        finally:
            await remotes.close()

    return asyncio.run(main())
