"""A request that waits for a limit of its API has not started. Time is virtual: a loop that waits skips ahead."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.remote.clients import CompletionsClient, Questions
from recipe.dag.remote.connect import Remotes
from recipe.dag.remote.transport import Transport
from recipe.dag.types.model import Api
from tests.episode.test_episode_tool_limits import run

SCRIPT = """
import asyncio
async def quick(messages):
    await asyncio.sleep(1.0)
    return "ok"
async def slow(messages):
    await asyncio.sleep(3.0)
    return "late"
"""


def play(world, function: str, **api):
    """Eight episodes of one call of at most 2.5 s, at once; then one more."""
    options = {"script": f"judge.py:{function}", **api}
    workflow = world.workflow(
        [{"id": "solve"}],
        files={"judge.py": SCRIPT},
        policies={"main": {"api": options}},
        episode={"call_timeout_s": 2.5, "timeout_s": 3.0, "on_failure": "mask"},
    )

    async def main():
        remotes = Remotes(workflow)
        runner = EpisodeRunner(workflow, remotes.endpoints, {}, seed=0)
        try:
            return await asyncio.gather(*(runner.run(world.sample(), f"u{k}", 0, step=0) for k in range(8)))
        finally:
            await remotes.close()

    return run(main())


@pytest.mark.parametrize("api", [{"requests_per_minute": 60.0}, {"max_concurrent": 1}], ids=["rate", "slots"])
def test_a_call_that_waits_for_a_limit_of_its_api_has_not_started(world, api):
    episodes = play(world, "quick", **api)
    assert [episode.fault for episode in episodes] == [None] * 8
    assert {episode.calls[0].text for episode in episodes} == {"ok"}


def test_a_prompt_of_token_ids_waits_alike(world):
    class Quick(Transport):
        async def exchange(self, request):
            await asyncio.sleep(1.0)
            return {"choices": [{"text": "ok", "finish_reason": "stop"}]}

    api = Api(base_url="http://x/v1", model="test", tokenizer="t", requests_per_minute=60.0)
    workflow = world.workflow(
        [{"id": "solve"}],
        policies={"main": {"api": {"base_url": "http://x/v1", "model": "test", "tokenizer": "t"}}},
        episode={"call_timeout_s": 2.5, "timeout_s": 3.0, "generation_timeout_s": 2.0, "on_failure": "mask"},
    )
    tokenizer = world.Tokenizer()

    async def main():
        transport = Quick(api, url="http://x/v1", key=None, where="policy main")
        client = CompletionsClient(Questions(api, transport), name="test", tokenizer=tokenizer, end_of_turn=2)
        runner = EpisodeRunner(workflow, {"main": PolicyEndpoint(client, tokenizer, 4096)}, {}, seed=0)
        episodes = await asyncio.gather(*(runner.run(world.sample(), f"u{k}", 0, step=0) for k in range(8)))
        await transport.close()
        return episodes

    assert [episode.fault for episode in run(main())] == [None] * 8


def test_requests_that_are_cut_off_while_they_wait_for_the_rate_leave_their_slots_to_others():
    class Quick(Transport):
        async def exchange(self, request):
            return {}

    async def main():
        loop = asyncio.get_running_loop()
        api = Api(base_url="http://x/v1", model="test", requests_per_minute=60.0)
        transport = Quick(api, url="http://x/v1", key=None, where="policy main", clock=loop.time)
        asked = [asyncio.create_task(transport.post("/c", {}, timeout_s=9.0)) for _ in range(8)]
        await asyncio.sleep(2.5)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await transport.post("/c", {}, timeout_s=9.0)
        await transport.close()
        return loop.time()

    assert run(main()) == 3.0  # not 8.0


def test_the_time_of_a_server_that_is_slow_counts(world):
    episodes = play(world, "slow", requests_per_minute=60.0, retries=0)
    assert all(episode.fault is not None for episode in episodes)
