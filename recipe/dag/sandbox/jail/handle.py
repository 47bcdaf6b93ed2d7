"""A jail, as the server holds it.

Invariant: a jail is addressed by descriptors only, never by a process number, which may have become another's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress


class Jail:
    """A jail that waits for its job. `close` closes `connection`, `process` (a pidfd of its first one), and `words`, a
    pipe that complaints go into."""

    def __init__(
        self, connection: socket.socket, process: int, on_close: Callable[[], None] | None = None, words: int = -1
    ):
        self.connection = connection
        self.process = process
        self._on_close = on_close
        self._words = words
        connection.setblocking(False)

    def last_words(self) -> str:
        """What was said on the way to a jail that never took its job."""
        if self._words < 0:
            return ""
        os.set_blocking(self._words, False)
        with suppress(BlockingIOError):
            return os.read(self._words, 4096).decode("utf-8", "replace").strip()
        return ""

    def lives(self) -> bool:
        try:
            signal.pidfd_send_signal(self.process, 0)
        except ProcessLookupError:
            return False
        return True

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)

    def number(self) -> int:
        """The process's number, as this process sees it; 0 when it is gone."""
        with open(f"/proc/self/fdinfo/{self.process}") as file:
            for line in file:
                if line.startswith("Pid:"):
                    return max(0, int(line.split()[1]))
        return 0

    async def gone(self) -> None:
        """Wait until every process of the jail is dead."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.process, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.process)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.connection.close()
        os.close(self.process)
        if self._words >= 0:
            os.close(self._words)
        if self._on_close is not None:
            self._on_close()
