from __future__ import annotations

import asyncio
import os
import threading

import pytest

from recipe.dag.core import tasks, threads
from recipe.dag.core.tasks import invoke
from recipe.dag.core.threads import WorkerThreads


def test_quick_calls_share_threads(monkeypatch):
    monkeypatch.setattr(tasks, "_threads", WorkerThreads())

    async def main() -> set[threading.Thread]:
        return {await invoke(threading.current_thread) for _ in range(200)}

    assert len(asyncio.run(main())) < 100  # FEW, and more where a busy machine keeps those from running


def test_calls_that_block_hold_up_no_others():
    release = threading.Event()

    async def main() -> int:
        blocked = [asyncio.create_task(invoke(release.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        answer = await asyncio.wait_for(invoke(lambda: 5), 30)
        assert not any(task.done() for task in blocked)
        release.set()
        await asyncio.gather(*blocked)
        return answer

    assert asyncio.run(main()) == 5


def test_a_call_that_was_given_up_keeps_its_thread_only():
    release = threading.Event()

    async def main() -> None:
        for _ in range(2 * threads.FEW):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(invoke(release.wait), 0.001)
        assert await asyncio.wait_for(invoke(lambda: 5), 30) == 5

    try:
        asyncio.run(main())
    finally:
        release.set()


def test_idle_threads_end(monkeypatch):
    monkeypatch.setattr(threads, "IDLE_S", 0.01)
    ran: list[threading.Thread] = []
    pool, done = WorkerThreads(), threading.Event()
    pool.run(lambda: (ran.append(threading.current_thread()), done.set()))
    assert done.wait(30)
    ran[0].join(30)
    assert not ran[0].is_alive()
    done.clear()
    pool.run(done.set)
    assert done.wait(30)


def test_a_forked_process_starts_threads_of_its_own():
    pool, done = WorkerThreads(), threading.Event()
    pool.run(done.set)
    assert done.wait(30)
    child = os.fork()
    if child == 0:
        again = threading.Event()
        pool.run(again.set)
        os._exit(0 if again.wait(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
