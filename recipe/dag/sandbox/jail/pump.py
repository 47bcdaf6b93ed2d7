"""What a job prints, taken from a pipe.

Invariant: no program blocks on its output for longer than it takes to look again; the first `limit` bytes are kept, the
rest is read and dropped. Until a pipe is filling up it is only looked at now and then: most programs end before, and
one read is all that it takes.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import termios

from recipe.dag.sandbox.decode import decode

_CHUNK = 1 << 16
_FILLING_BYTES = 1 << 13
_waiting = array.array("i", [0])
_LAST_READS = 32
"""A pipe holds at most 1 MiB when all who could write are dead."""


class Pump:
    def __init__(self, limit: int):
        self._limit = limit
        self._kept = bytearray()
        self._cut = False
        self._started = False
        self._loop = asyncio.get_running_loop()
        read, self.write_end = os.pipe2(os.O_CLOEXEC)
        self._read: int | None = read
        os.set_blocking(read, False)

    def sent(self) -> None:
        """Close our copy of the end that programs write to."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def start_when_filling(self) -> bool:
        """Start if a pipe's worth is not far; returns whether it is started."""
        if self._read is None or self._started:
            return True
        fcntl.ioctl(self._read, termios.FIONREAD, _waiting)
        if _waiting[0] >= _FILLING_BYTES:
            self._started = True
            self._loop.add_reader(self._read, self._take)
        return self._started

    def close(self) -> None:
        """Take what is there still and let go. Call it when all writers are dead."""
        self.sent()
        if self._read is None:
            return
        for _ in range(_LAST_READS):
            if not self._take():
                break
        self._stop()
        os.close(self._read)
        self._read = None

    def text(self) -> str:
        return decode(bytes(self._kept), cut=self._cut)

    def _take(self) -> bool:
        try:
            data = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            # At its end a pipe is always readable; asked again, the loop would spin.
            self._stop()
            return False
        room = self._limit - len(self._kept)
        self._cut |= len(data) > room
        self._kept += data[:room]
        return True

    def _stop(self) -> None:
        if self._started:
            self._loop.remove_reader(self._read)
            self._started = False
