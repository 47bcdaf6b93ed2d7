from __future__ import annotations

import asyncio

from recipe.dag.core.pace import Pace
from tests.episode.test_episode_tool_limits import run


def test_the_slot_of_a_cancelled_wait_is_used_again_unless_it_has_passed_and_no_two_starts_share_one():
    starts: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pace = Pace(60.0, loop.time, period_s=60.0)

        async def start() -> None:
            await pace.wait()
            starts.append(loop.time())

        first = [asyncio.create_task(start()) for _ in range(8)]
        await asyncio.sleep(2.5)
        for task in first[4:]:
            task.cancel()
        await asyncio.gather(*(start() for _ in range(5)))
        unused = [asyncio.create_task(start()) for _ in range(2)]
        await asyncio.sleep(0)
        unused[1].cancel()
        await asyncio.sleep(50)
        await start()

    run(main())
    assert starts == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 58]
