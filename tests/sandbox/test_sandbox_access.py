from __future__ import annotations

import asyncio

import pytest

from recipe.sandbox.access import Access


def test_readers_together_writers_alone_in_the_order_of_asking():
    async def scenario() -> list[str]:
        access, log = Access(), []

        async def use(how: str, name: str) -> None:
            async with getattr(access, how)(30):
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
        access = Access()
        async with getattr(access, holder)(30):
            with pytest.raises(TimeoutError):
                async with access.write(0.01):
                    pass
            waiting = asyncio.create_task(access.write(30).__aenter__())
            await asyncio.sleep(0.01)
            waiting.cancel()
        async with access.write(1):
            pass
        async with access.read(1), access.read(1):
            pass

    asyncio.run(scenario())
