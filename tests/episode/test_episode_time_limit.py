"""Time limits stand still while work waits for its turn. Time is virtual: a loop that waits skips ahead."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import TimeoutFault
from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.remote.clients import CompletionsClient, Questions
from recipe.dag.episode.remote.connect import Remotes
from recipe.dag.episode.remote.transport import Transport
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.tasks import limited
from recipe.dag.episode.time_limit import innermost, waiting
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


def test_a_limit_stands_still_while_its_work_waits():
    async def main():
        async with limited(2.0, TimeoutFault, "the call") as limit:
            await asyncio.sleep(1.5)
            with waiting():
                await asyncio.sleep(10.0)
                assert limit.left_s == 0.5
            assert limit.left_s == 0.5 and innermost() is limit
            with pytest.raises(TimeoutFault):
                async with limited(0.4, TimeoutFault, "a part"):
                    await asyncio.sleep(1.0)
        assert innermost() is None
        with pytest.raises(TimeoutFault):
            async with limited(2.0, TimeoutFault, "the call"):
                with waiting():
                    await asyncio.sleep(10.0)
                await asyncio.sleep(2.1)

    run(main())


def test_waits_at_the_same_time_hold_a_limit_around_them_once():
    async def wait(seconds: float) -> None:
        with waiting():
            await asyncio.sleep(seconds)

    async def main():
        async with limited(2.0, TimeoutFault, "the episode") as limit:
            await asyncio.gather(wait(5.0), wait(7.0), asyncio.sleep(7.5))
            assert limit.left_s == 1.5

    run(main())


def test_a_wait_that_is_cut_off_from_outside_ends_the_hold():
    async def main():
        async with limited(2.0, TimeoutFault, "the episode") as outer:
            waits = asyncio.create_task(wait_long())
            await asyncio.sleep(0.5)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            assert outer.left_s == 2.0
            with pytest.raises(TimeoutFault):
                async with limited(1.0, TimeoutFault, "a part"):
                    await asyncio.sleep(1.5)

    async def wait_long() -> None:
        with waiting():
            await asyncio.sleep(100.0)

    run(main())


def play(world, function: str, **api):
    """Eight episodes of one call of at most 2.5 s, at once; then one more."""
    options = {"script": f"judge.py:{function}", **api}
    workflow = world.workflow(
        [{"node_id": "solve"}],
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
        [{"node_id": "solve"}],
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
