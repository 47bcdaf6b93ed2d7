"""The event loops of async envs: they work as asyncio's do, and take no descriptor."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from recipe.dag.episode.light_loop import LightLoop


@pytest.fixture
def run():
    loop = LightLoop()
    yield loop.run_until_complete
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def echo(reader, writer) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def test_sockets_streams_and_timers_work(run):
    async def main():
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def talk(number: int) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sent = bytes([number]) * 300_000  # more than a socket takes at once, so that writing has to wait
            task = asyncio.create_task(reader.readexactly(len(sent)))
            writer.write(sent)
            await writer.drain()
            back = await task
            writer.close()
            return back == sent

        async with server:
            assert all(await asyncio.gather(*(talk(number) for number in range(20))))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()

    run(main())


def test_other_threads_and_programs_are_heard(run):
    async def main():
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        threading.Timer(0.05, loop.call_soon_threadsafe, [event.set]).start()
        await event.wait()
        assert await asyncio.to_thread(lambda: 5) == 5
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print(input() * 2)", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert (await program.communicate(b"ab\n"))[0] == b"abab\n" and program.returncode == 0

    run(main())


def test_a_loop_that_is_busy_does_not_keep_the_poller_spinning_or_others_waiting(run):
    """A readable descriptor whose loop does not look at it."""

    async def main():
        read, write = os.pipe()
        heard = []
        asyncio.get_running_loop().add_reader(read, heard.append, 1)
        await asyncio.sleep(0)
        os.write(write, b"x")
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.2 and not heard
        other = LightLoop()
        try:
            assert await asyncio.to_thread(other.run_until_complete, asyncio.sleep(0.01, "other")) == "other"
        finally:
            other.close()
        while len(heard) < 3:  # still readable, so it is reported again and again
            await asyncio.sleep(0.001)
        asyncio.get_running_loop().remove_reader(read)
        os.close(read)
        os.close(write)

    run(main())


def test_loops_take_no_descriptors(run):
    run(asyncio.sleep(0))
    gc.collect()
    before = descriptors()
    loops = [LightLoop() for _ in range(100)]
    for loop in loops:
        loop.run_until_complete(asyncio.sleep(0.001))
    assert descriptors() == before
    for loop in loops:
        loop.close()
