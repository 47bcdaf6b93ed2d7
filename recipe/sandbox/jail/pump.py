"""Reads a job's output from a pipe.

Invariant: no program blocks on its output for longer than the polling interval; the first `limit` bytes are kept, the
rest is read and dropped. A pipe is only polled until something is in it: most programs end before, and one read is
enough. (How many bytes fill a pipe depends on the writes, the program, and the number of the user's pipes.)
"""

from __future__ import annotations

import array
import asyncio
import codecs
import fcntl
import os
import termios

_CHUNK = 1 << 16
_available = array.array("i", [0])
_LAST_READS = 32
"""Enough reads to empty a pipe, which holds at most 1 MiB once all writers are dead."""


class Pump:
    """A pipe with a bounded buffer. limit: bytes to keep."""

    def __init__(self, limit: int):
        self._limit = limit
        self._kept = bytearray()
        self._cut = False
        self._started = False
        self._loop = asyncio.get_running_loop()
        read, self.write_end = os.pipe2(os.O_CLOEXEC)
        self._read = read
        os.set_blocking(read, False)

    def sent(self) -> None:
        """Close this process's copy of the write end, after it was sent to the jail."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def start_when_written(self) -> bool:
        """Start to read if something is in the pipe; return whether polling can stop."""
        if self._read < 0 or self._started:
            return True
        fcntl.ioctl(self._read, termios.FIONREAD, _available)
        if _available[0]:
            self._started = True
            self._loop.add_reader(self._read, self._take)
        return self._started

    def close(self) -> None:
        """Read the rest and close the pipe. Call it when all writers are dead."""
        self.sent()
        if self._read < 0:
            return
        for _ in range(_LAST_READS):
            if not self._take():
                break
        self._stop()
        os.close(self._read)
        self._read = -1

    def text(self) -> str:
        """Return the kept bytes; as in SandboxFusion, what is not UTF-8 is replaced by one line that says why."""
        try:
            # An incomplete last character is omitted if what followed was dropped.
            return codecs.getincrementaldecoder("utf-8")().decode(bytes(self._kept), final=not self._cut)
        except UnicodeDecodeError as error:
            return f"[DecodeError] {error}"

    def _take(self) -> bool:
        try:
            data = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            # A pipe without writers is always readable, so the loop would spin.
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
