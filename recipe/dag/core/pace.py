"""How fast requests and calls start, and what part of a limit is a process's own.

Invariant: starts are spaced evenly, and what was not used before is not saved up. No clock is read but the one that is
passed in.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]
"""Returns seconds."""


@dataclass(slots=True)
class Pace:
    """Spaces starts evenly: `rate` of them in `period_s`; None: no limit."""

    rate: float | None
    clock: Clock
    period_s: float = 1.0
    _next: float = float("-inf")
    _returned: list[float] = field(default_factory=list)
    """A heap of the slots before `_next` that were not used."""

    async def wait(self) -> None:
        """Wait for the first free slot. A cancelled wait frees it."""
        if self.rate is None:
            return
        slot = self._reserve(self.period_s / self.rate)
        try:
            await asyncio.sleep(slot - self.clock())
        except BaseException:
            if slot > self.clock():
                heapq.heappush(self._returned, slot)
            raise

    def _reserve(self, interval_s: float) -> float:
        now = self.clock()
        while self._returned:
            if (slot := heapq.heappop(self._returned)) >= now:
                return slot
        slot = max(now, self._next)
        self._next = slot + interval_s
        return slot


def part_of(most: int | None, rate: float | None, index: int, count: int) -> tuple[int | None, float | None]:
    """Return the number at once and the rate for process `index` of `count`; the parts together are the whole."""
    own = None if most is None else most // count + (index < most % count)
    return own, None if rate is None else rate / count
