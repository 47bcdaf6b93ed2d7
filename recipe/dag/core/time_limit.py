"""Time limits that stand still while the work under them waits for its turn.

Invariant: what waits has not started. `waiting` holds every limit around it, that of the episode included, until its
body ends. Several waits at once under one limit hold it as long as one of them lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_around: ContextVar[tuple[TimeLimit, ...]] = ContextVar("time_limits", default=())
"""The limits around the code that runs, the innermost last."""


class TimeLimit:
    """The end of a piece of work, on the loop's clock."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + seconds
        self._scope = asyncio.timeout_at(self._end)
        self._running = False
        self._waits, self._since = 0, 0.0

    @property
    def end(self) -> float:
        """When the limit is reached if nothing waits from now on."""
        return self._end + (self._loop.time() - self._since if self._waits else 0.0)

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least a millisecond."""
        return max(self.end - self._loop.time(), 0.001)

    @property
    def expired(self) -> bool:
        return self._scope.expired()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Cancel the body when the limit is reached, and raise TimeoutError; `expired` tells it from the body's own."""
        token = _around.set((*_around.get(), self))
        try:
            async with self._scope:
                self._running = True
                try:
                    yield
                finally:
                    self._running = False
        finally:
            _around.reset(token)

    def hold(self) -> None:
        if not self._waits:
            self._since = self._loop.time()
            self._reschedule(None)
        self._waits += 1

    def go_on(self) -> None:
        self._waits -= 1
        if not self._waits:
            self._end += self._loop.time() - self._since
            self._reschedule(self._end)

    def _reschedule(self, when: float | None) -> None:
        # user code that catches every cancellation may outlive its limit, and a limit that is reached stays so
        if self._running and not self.expired:
            self._scope.reschedule(when)

    @property
    def here(self) -> bool:
        """Whether the running loop is the limit's own."""
        return self._loop is asyncio.get_running_loop()


def innermost() -> TimeLimit | None:
    """Return the closest limit around the running code, if any."""
    return next((limit for limit in reversed(_around.get()) if limit.here), None)


@contextmanager
def waiting() -> Iterator[None]:
    """Hold all limits around the body, which waits for its turn: for work that has its own limits."""
    held = [limit for limit in _around.get() if limit.here]
    for limit in held:
        limit.hold()
    try:
        yield
    finally:
        for limit in held:
            limit.go_on()
