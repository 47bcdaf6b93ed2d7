"""One writer, or any number of readers.

Invariant: while a writer has access, no other task has. Access is given in the order of asking, so that readers
cannot keep a writer out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReadWriteLock:
    def __init__(self):
        self._turn = asyncio.Lock()
        self._readers = 0
        self._unread = asyncio.Event()
        self._unread.set()

    @asynccontextmanager
    async def write(self, patience_s: float) -> AsyncIterator[None]:
        """Be the only one with access. Raises TimeoutError after `patience_s`."""
        async with asyncio.timeout(patience_s) as patience, self._turn:
            await self._unread.wait()
            patience.reschedule(None)
            yield

    @asynccontextmanager
    async def read(self, patience_s: float) -> AsyncIterator[None]:
        """Have access with other readers. Raises TimeoutError after `patience_s`."""
        async with asyncio.timeout(patience_s), self._turn:
            self._readers += 1
            self._unread.clear()
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._unread.set()
