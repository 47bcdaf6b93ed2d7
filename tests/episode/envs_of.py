"""Batches of episodes in envs."""

from __future__ import annotations

import asyncio

from recipe.dag.episode.batch import run_batch


def batch(world, flow, samples, client=None, n: int = 1):
    async def main():
        made = world.runner(flow, client)
        episodes = await run_batch(made, [(s, f"u{k}") for k, s in enumerate(samples)], n, step=0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return episodes

    return asyncio.run(main())
