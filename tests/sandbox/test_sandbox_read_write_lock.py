from __future__ import annotations

import asyncio

import pytest

from recipe.sandbox.read_write_lock import ReadWriteLock


def test_readers_together_writers_alone_in_the_order_of_asking():
    async def scenario() -> list[str]:
        lock, log = ReadWriteLock(), []

        async def use(how: str, name: str) -> None:
            async with getattr(lock, how)(30):
                log.append(f"+{name}")
                await asyncio.sleep(0.02)
                log.append(f"-{name}")

        wanted = [("read", "a"), ("read", "b"), ("write", "C"), ("read", "d"), ("write", "E"), ("write", "F")]
        async with asyncio.TaskGroup() as group:
            for how, name in wanted:
                group.create_task(use(how, name))
        return log

    assert asyncio.run(scenario()) == ["+a", "+b", "-a", "-b", "+C", "-C", "+d", "-d", "+E", "-E", "+F", "-F"]


@pytest.mark.parametrize("holder", ["read", "write"])
def test_who_gives_up_leaves_access_to_others(holder):
    async def scenario() -> None:
        lock = ReadWriteLock()
        async with getattr(lock, holder)(30):
            with pytest.raises(TimeoutError):
                async with lock.write(0.01):
                    pass
            waiting = asyncio.create_task(lock.write(30).__aenter__())
            await asyncio.sleep(0.01)
            waiting.cancel()
        async with lock.write(1):
            pass
        async with lock.read(1), lock.read(1):
            pass

    asyncio.run(scenario())
