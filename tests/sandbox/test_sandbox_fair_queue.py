"""The queue is bounded and fair, limits waiting times, and never loses a slot."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from recipe.sandbox.fair_queue import FairQueue, Overloaded


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def held(queue: FairQueue, client: str, order: list[str], release: asyncio.Event, patience_s: float = 60):
    async def hold() -> None:
        async with queue.slot(client, patience_s):
            order.append(client)
            await release.wait()

    return asyncio.create_task(hold())


def test_clients_take_turns_however_many_jobs_each_sends():
    async def scenario() -> list[str]:
        queue, order, release = FairQueue(1, 100), [], asyncio.Event()
        tasks = [held(queue, "first", order, release)]
        await settle()
        for client in ("greedy",) * 5 + ("modest", "late"):
            tasks.append(held(queue, client, order, release))
            await settle()
        assert (queue.running, queue.waiting) == (1, 7)
        release.set()
        await asyncio.gather(*tasks)
        assert (queue.running, queue.waiting) == (0, 0)
        return order

    assert asyncio.run(scenario()) == ["first", "greedy", "modest", "late", *["greedy"] * 4]


def test_no_more_than_the_slots_run_and_no_more_than_the_depth_wait():
    async def scenario() -> None:
        queue, order, release = FairQueue(2, 3), [], asyncio.Event()
        tasks = [held(queue, "a", order, release) for _ in range(6)]
        await settle()
        assert (queue.running, queue.waiting) == (2, 3)
        with pytest.raises(Overloaded, match="3 jobs are already waiting"):
            await tasks[5]
        release.set()
        await asyncio.gather(*tasks[:5])
        assert len(order) == 5

    asyncio.run(scenario())


def test_a_full_queue_drops_the_newest_job_of_the_client_with_most():
    async def scenario() -> None:
        queue, order, release = FairQueue(1, 4), [], asyncio.Event()
        tasks = [held(queue, "greedy", order, release) for _ in range(5)]
        await settle()
        modest = held(queue, "modest", order, release)
        with pytest.raises(Overloaded, match="most of them yours"):
            await tasks[4]
        release.set()
        await asyncio.gather(*tasks[:4], modest)
        assert order == ["greedy", "greedy", "modest", "greedy", "greedy"]

    asyncio.run(scenario())


def test_a_job_that_waits_too_long_is_refused_and_the_slot_goes_on():
    async def scenario() -> None:
        queue, order, release = FairQueue(1, 9), [], asyncio.Event()
        first = held(queue, "a", order, release)
        await settle()
        with pytest.raises(Overloaded, match=r"within 0\.01 s"):
            async with queue.slot("b", 0.01):
                pass
        last = held(queue, "c", order, release)
        release.set()
        await asyncio.gather(first, last)
        assert order == ["a", "c"] and queue.waiting == queue.running == 0

    asyncio.run(scenario())


def test_closing_refuses_all_that_wait():
    async def scenario() -> None:
        queue, order, release = FairQueue(1, 9), [], asyncio.Event()
        running, waiting = held(queue, "a", order, release), held(queue, "a", order, release)
        await settle()
        queue.close()
        with pytest.raises(Overloaded, match="stopping"):
            await waiting
        with pytest.raises(Overloaded, match="stopping"):
            async with queue.slot("b", 1):
                pass
        release.set()
        await running
        assert queue.running == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_no_slot_is_lost_whatever_is_cancelled_and_when(seed):
    async def scenario() -> None:
        rng, queue = random.Random(seed), FairQueue(3, 20)
        most = 0

        async def job(client: str) -> None:
            nonlocal most
            async with queue.slot(client, rng.choice([0.0, 0.001, 5.0])):
                most = max(most, queue.running)
                await asyncio.sleep(rng.choice([0, 0, 0.001]))

        tasks = []
        for _ in range(150):
            tasks.append(asyncio.create_task(job(rng.choice("abc"))))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.choice([0, 0.001]))
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
        for task in tasks:
            with suppress(Overloaded, asyncio.CancelledError):
                await task
        assert (queue.running, queue.waiting) == (0, 0) and most == 3
        async with asyncio.timeout(1), queue.slot("a", 1), queue.slot("b", 1), queue.slot("c", 1):
            assert queue.running == 3

    asyncio.run(scenario())
