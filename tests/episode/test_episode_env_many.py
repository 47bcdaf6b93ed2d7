"""As many async envs as a run has episodes in flight, in a process that may open few files."""

from __future__ import annotations

import asyncio
import resource

import pytest

from recipe.dag.episode.batch import run_batch

ENV = """
import asyncio

class Env:
    async def reset(self, sample, seed):
        await asyncio.sleep(0.001)
        return "go"
    async def step(self, actions, ground_truth):
        reader, writer = await asyncio.open_unix_connection(ground_truth)
        await reader.readexactly(1)
        writer.close()
        return None, 1.0, True
    async def close(self):
        await asyncio.sleep(0)
"""


@pytest.fixture
def few_files():
    """1,024 descriptors, as many systems allow."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_envs_that_connect_take_the_descriptors_of_their_connections_alone(world, few_files, tmp_path):
    """Half as many as a loop for each env would take."""
    options = {"sees_env": True, "env": ["env.py:Env"], "env_pays": True}
    flow = world.workflow([{"id": "a", **options}], files={"env.py": ENV}, episode={"retries": 0})
    sample = {**world.sample("question"), "ground_truth": str(tmp_path / "s")}
    count, waiting, all_there = 300, [], asyncio.Event()

    async def serve(reader, writer) -> None:
        waiting.append(writer)
        if len(waiting) == count:
            all_there.set()
        await all_there.wait()
        writer.write(b"x")
        await writer.drain()
        writer.close()

    async def main() -> list:
        server = await asyncio.start_unix_server(serve, tmp_path / "s", backlog=count)
        async with server:
            return await run_batch(world.runner(flow), [(sample, "u")], count, step=0, max_in_flight=count)

    episodes = asyncio.run(main())
    assert [call.reward for episode in episodes for call in episode.calls] == [1.0] * count == [1.0] * len(waiting)
