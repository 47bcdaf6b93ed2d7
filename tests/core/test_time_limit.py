"""Time limits stand still while work waits for its turn. Time is virtual: a loop that waits skips ahead."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import TimeoutFault
from recipe.dag.core.tasks import limited
from recipe.dag.core.time_limit import innermost, waiting
from tests.episode.test_episode_tool_limits import run


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
