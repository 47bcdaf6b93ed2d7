"""The server's handle on a jail.

Invariant: a jail is addressed by descriptors only, never by a process number, which may have been reused.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from recipe.sandbox.jail.cgroup import Group
from recipe.sandbox.jail.helper import Helper
from recipe.sandbox.jail.supervisor import WAKE


class Jail:
    """A jail that waits for its job. `close` closes `connection` and `process` (a pidfd of the jail's first process).

    dies_whole: all of its processes die with the first one. group: the control group that its processes are in; None
    where the machine grants none. on_close: called at its end.
    """

    def __init__(
        self,
        connection: socket.socket,
        process: int,
        zygote: Helper,
        on_close: Callable[[], None],
        *,
        dies_whole: bool,
        group: Group | None = None,
    ):
        self._dies_whole = dies_whole
        self.connection = connection
        self.process = process
        self.group = group
        self._zygote = zygote
        self._on_close = on_close
        connection.setblocking(False)

    def is_alive(self) -> bool:
        try:
            signal.pidfd_send_signal(self.process, 0)
        except ProcessLookupError:
            return False
        return True

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)

    def stop(self) -> None:
        """Tell the jail to end its job."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        self.signal(WAKE)

    def kill(self) -> None:
        """End the jail with all of its processes."""
        if self._dies_whole:
            self.signal(signal.SIGKILL)
        else:
            self.stop()

    def is_orphan(self) -> bool:
        """Return whether the zygote, with which all of its jails die, has ended."""
        return self._zygote.number() is None

    def number(self) -> int:
        """Return the process number in this process's namespace; 0 if the process is dead."""
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
        self._on_close()
