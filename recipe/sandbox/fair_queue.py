"""A bounded queue for a number of slots that is fair among clients.

Invariant: at most `slots` jobs hold a slot and at most `depth` wait. Clients take turns, however many jobs each has
waiting; in a full queue the newest job of the client with the most waiting is dropped. No job waits longer than its
patience.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Overloaded(Exception):
    """No slot became free in time, or the queue is full. Nothing was run: the job can be tried again."""


def default_slots() -> int:
    """Return the default number of slots: more than the cores, since programs that sleep must not block the others."""
    return max(8, 4 * len(os.sched_getaffinity(0)))


class FairQueue:
    """Grants slots to clients in turn. depth: jobs that may wait."""

    def __init__(self, slots: int, depth: int):
        self.slots = slots
        self.depth = depth
        self.running = 0
        self.waiting = 0
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        self._closed = False

    @asynccontextmanager
    async def slot(self, client: str, patience_s: float) -> AsyncIterator[None]:
        """Hold a slot. Raises Overloaded."""
        await self._acquire(client, patience_s)
        try:
            yield
        finally:
            self._release()

    def close(self) -> None:
        """Refuse all jobs that wait, and all that come later."""
        self._closed = True
        for line in self._lines.values():
            for turn in line:
                if not turn.done():
                    turn.set_exception(Overloaded("the server is stopping"))

    async def _acquire(self, client: str, patience_s: float) -> None:
        if self._closed:
            raise Overloaded("the server is stopping")
        if self.running < self.slots:
            self.running += 1
            return
        if self.waiting >= self.depth:
            self._make_room(client)
        line = self._lines.setdefault(client, deque())
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        self.waiting += 1
        try:
            async with asyncio.timeout(patience_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # The slot was granted at the same moment.
                self._release()
            if isinstance(error, TimeoutError):
                raise Overloaded(f"no slot became free within {patience_s:g} s") from None
            raise
        finally:
            self.waiting -= 1
            if turn in line:
                line.remove(turn)
            if not line and self._lines.get(client) is line:
                del self._lines[client]

    def _make_room(self, client: str) -> None:
        longest = max(self._lines, key=lambda name: len(self._lines[name]), default=client)
        if len(self._lines.get(longest, ())) <= len(self._lines.get(client, ())) + 1:
            raise Overloaded(f"{self.waiting} jobs are already waiting")
        turn = self._lines[longest].pop()
        if not turn.done():
            turn.set_exception(Overloaded(f"{self.waiting} jobs are already waiting, most of them yours"))

    def _release(self) -> None:
        """Hand the slot to the next client in turn, or free it."""
        while self._lines:
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            while line:
                turn = line.popleft()
                if not turn.done():
                    if line:
                        # Reinserted at the end: every other client comes first.
                        self._lines[client] = line
                    turn.set_result(None)
                    return
        self.running -= 1
