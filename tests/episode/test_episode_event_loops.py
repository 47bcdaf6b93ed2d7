import asyncio
import gc
import threading

import pytest

from recipe.dag.core import tasks
from recipe.dag.episode import event_loops
from recipe.dag.episode.event_loops import EnvLoop, OnLoop


def env_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "episode-envs"}


async def where():
    return asyncio.get_running_loop(), threading.current_thread()


def test_envs_share_a_few_loops_and_each_stays_on_its_own():
    async def main():
        envs = [EnvLoop() for _ in range(3 * event_loops.SHARED)]
        first = [await env.run(where()) for env in envs]
        assert [await env.run(where()) for env in envs] == first
        assert len(set(first)) == event_loops.SHARED and await where() not in first
        for env in envs[1:]:
            env.close()
        assert await envs[0].run(where()) == first[0]  # it keeps its loop until it is closed itself
        envs[0].close()
        return set(first)

    for loop, thread in asyncio.run(main()):
        thread.join(60)
        assert loop.is_closed() and not thread.is_alive()


def test_what_an_env_leaves_running_ends_with_its_loop():
    ended = threading.Event()

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def leave():
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task

    async def main():
        env = EnvLoop()
        task = await env.run(leave())
        assert not task.done() and not ended.is_set()
        env.close()

    asyncio.run(main())
    assert ended.wait(60)


def test_no_thread_for_an_env_without_coroutines():
    before = env_threads()
    env = EnvLoop()
    env.close()
    assert env_threads() <= before


@pytest.mark.parametrize("error", [ValueError("boom"), StopAsyncIteration()])
def test_an_exception_comes_back_as_it_is(error):
    async def fail():
        raise error

    async def main():
        env = EnvLoop()
        try:
            await env.run(fail())
        finally:
            env.close()

    with pytest.raises(type(error)) as caught:
        asyncio.run(main())
    assert caught.value is error


def test_a_cancelled_coroutine_is_waited_for():
    log = []

    async def work():
        try:
            log.append("started")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            log.append("cleaned up")

    async def main():
        env = EnvLoop()
        task = asyncio.create_task(env.run(work()))
        while not log:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["started", "cleaned up"]
        env.close()

    asyncio.run(main())


def test_a_loop_that_is_blocked_is_named_and_gets_no_further_envs(monkeypatch, caplog, recwarn):
    monkeypatch.setattr(tasks, "CLEAN_UP_S", 0.05)
    monkeypatch.setattr(event_loops, "BLOCKED_S", 0.2)
    monkeypatch.setattr(event_loops, "SHARED", 1)
    release, blocked = threading.Event(), []

    async def blocks():
        blocked.append(threading.current_thread())
        release.wait()

    async def give_up(env, coroutine, seconds=0.05):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await env.run(coroutine)

    async def main():
        bad, neighbour, later = EnvLoop(), EnvLoop(), EnvLoop()
        before = await neighbour.run(where())
        first = asyncio.create_task(give_up(bad, blocks(), seconds=1.0))  # it has to begin
        async with asyncio.timeout(30):
            while not blocked:
                await asyncio.sleep(0.001)
            await asyncio.gather(first, give_up(neighbour, where()))
            assert await later.run(where()) != before
            while "in blocks" not in caplog.text:
                await asyncio.sleep(0.01)
            release.set()
            assert await neighbour.run(where()) == before and blocked == [before[1]]
        for env in (bad, neighbour, later):
            env.close()

    asyncio.run(main())
    (warning,) = [record.getMessage() for record in caplog.records if "in blocks" in record.getMessage()]
    assert warning.startswith("all envs of one event loop wait for this") and "async code must not block" in warning
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_a_client_of_our_loop_works_from_another_one():
    class Client:
        url = "http://here"

        async def loop(self):
            return asyncio.get_running_loop()

        async def fail(self):
            raise ConnectionError("gone")

    async def main():
        client, env = OnLoop(Client()), EnvLoop()
        assert await env.run(client.loop()) is asyncio.get_running_loop() is await client.loop()
        assert client.url == "http://here"
        with pytest.raises(ConnectionError, match="gone"):
            await env.run(client.fail())
        env.close()

    asyncio.run(main())
