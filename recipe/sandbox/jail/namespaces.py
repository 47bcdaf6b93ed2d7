"""The wall of full isolation: each jail is a set of fresh namespaces.

Invariant: the first process of a jail is the first of its process namespace, so its death is the death of all others.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from recipe.sandbox.jail import inside, rootfs, separation, syscalls
from recipe.sandbox.jail.seccomp import Filter


class Namespaces:
    """See `wall.Wall`."""

    sweeps = False

    def __init__(self, settings: Mapping[str, Any]):
        self._settings = settings

    def prepare(self, control: socket.socket) -> Iterator[str]:
        yield "making namespaces"
        separation.separate(self._settings, control, inside.NAMESPACES)
        socket.sethostname(rootfs.NAME)
        yield "building the root file system"
        rootfs.build(self._settings["expose"], zero=self._settings["counted"])
        self._directories = rootfs.backing_directories()
        self._masked = inside.readable_masked()
        yield "leaving root"
        self._user, self._group = separation.leave_root(self._settings["user"])
        yield "assembling the filter"
        self._filter = Filter(shared_memory=self._settings["counted"])

    def start(self) -> None:
        """Nothing to do: a process namespace is born with these properties."""

    def fork(self) -> tuple[int, int]:
        return syscalls.clone(inside.NAMESPACES)

    def enter(self) -> None:
        inside.enter(
            self._user,
            self._group,
            self._directories,
            self._settings["expose"],
            self._masked,
            fixed_buffers=not self._settings["counted"],
        )

    def grant(self, job: Mapping[str, Any], mounts: Sequence[int]) -> None:
        inside.grant(job["work"], job["shares"], mounts)

    def confine(self, job: Mapping[str, Any]) -> None:
        inside.settle(self._filter)

    def environment(self, job: Mapping[str, Any]) -> dict[str, str]:
        return {}

    def shield(self) -> None:
        inside.shield()

    def end_all(self) -> None:
        if os.getpid() != 1:
            # In the machine's own namespace -1 would mean every process of this user.
            raise RuntimeError("only the first process of a jail ends all others")
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def read_back(self, job: Mapping[str, Any], work: Callable[[], None]) -> None:
        # This process has the job's rights and view.
        work()

    def sweep(self) -> None:
        """Nothing outlives its jail."""
