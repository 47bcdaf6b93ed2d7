import asyncio
import threading

import pytest

from recipe.dag.episode import tasks
from recipe.dag.episode.own_loop import OnLoop, OwnLoop


def env_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "episode-env"}


def test_all_of_an_envs_coroutines_share_one_loop_that_is_not_ours():
    async def where():
        return asyncio.get_running_loop(), threading.current_thread()

    async def main():
        own = OwnLoop()
        first, second, ours = await own.run(where()), await own.run(where()), await where()
        own.close()
        first[1].join(5)
        return first, second, ours

    first, second, ours = asyncio.run(main())
    assert first == second and first[0] is not ours[0] and first[1] is not ours[1]
    assert first[0].is_closed() and not first[1].is_alive()


def test_no_thread_for_an_env_without_coroutines():
    before = env_threads()
    own = OwnLoop()
    own.close()
    assert env_threads() <= before


@pytest.mark.parametrize("error", [ValueError("boom"), StopAsyncIteration()])
def test_an_exception_comes_back_as_it_is(error):
    async def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(OwnLoop().run(fail()))
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
        own = OwnLoop()
        task = asyncio.create_task(own.run(work()))
        while not log:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["started", "cleaned up"]
        own.close()

    asyncio.run(main())


def test_one_that_blocks_is_left_behind(monkeypatch):
    monkeypatch.setattr(tasks, "CLEAN_UP_S", 0.05)
    release, blocked = threading.Event(), []

    async def block():
        blocked.append(threading.current_thread())
        release.wait()

    async def main():
        own = OwnLoop()
        task = asyncio.create_task(own.run(block()))
        while not blocked:
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await task
        own.close()

    asyncio.run(main())
    assert blocked[0].is_alive()
    release.set()
    blocked[0].join(5)
    assert not blocked[0].is_alive()


def test_a_client_of_our_loop_works_from_another_one():
    class Client:
        url = "http://here"

        async def loop(self):
            return asyncio.get_running_loop()

        async def fail(self):
            raise ConnectionError("gone")

    async def main():
        client, own = OnLoop(Client()), OwnLoop()
        assert await own.run(client.loop()) is asyncio.get_running_loop() is await client.loop()
        assert client.url == "http://here"
        with pytest.raises(ConnectionError, match="gone"):
            await own.run(client.fail())
        own.close()

    asyncio.run(main())
