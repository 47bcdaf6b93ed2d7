"""Measures the memory of all of a job's processes together, where no control group limits it.

Invariant: the measure is what the job costs this machine: memory that processes share, with each other or with the
zygote that they were forked from, is not counted more than once. The cheap measure is an upper bound; the exact one is
taken only if that is too high, process by process, so that a job with many of them delays the others' measures by one
process a round, and the event loop not at all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from recipe.sandbox import descent

_PAGE = os.sysconf("SC_PAGE_SIZE")
_BUFFER = 212_992
"""The usual size of a socket's buffer in one direction, in case it cannot be read."""
Job = TypeVar("Job")


class Watchdog:
    """Measures in its own thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "watchdog")
        self._measures: dict[object, Iterator[bool]] = {}
        """The measures that are not finished, by job."""

    async def excessive(self, jobs: Mapping[Job, tuple[int, float]]) -> list[Job]:
        """Continue measuring each job, given as its first process and its limit in bytes, and return those that are
        known to exceed it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._round, jobs)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _round(self, jobs: Mapping[Job, tuple[int, float]]) -> list[Job]:
        unfinished, self._measures = self._measures, {}
        over_limit = []
        for job, (process, limit) in jobs.items():
            measure = unfinished.get(job) or measured(process, limit)
            for exceeds in measure:
                if exceeds:
                    over_limit.append(job)
                else:
                    self._measures[job] = measure
                break
        return over_limit


def measured(process: int, limit: float) -> Iterator[bool]:
    """Measure `process` and its descendants. Yields False after each expensive step, True as soon as they are known to
    hold more than `limit` bytes together."""
    members = descent.descendants(process)
    buffers = _socket_buffers(process)
    if buffers + sum(map(_resident, members)) <= limit:
        return
    total = buffers
    for member in members:
        total += _proportional(member)
        yield total > limit


def _socket_buffers(process: int) -> int:
    """Return what the sockets in the process's network namespace may hold at most, in both directions: a program cannot
    make the buffers larger, and those of TCP are smaller (`inside.TCP_BUFFER`). 0 in the server's own namespace, whose
    sockets are everyone's."""
    with suppress(OSError):
        if os.path.samefile(f"/proc/{process}/ns/net", "/proc/self/ns/net"):
            return 0
    size = sum(map(_default_buffer, ("rmem_default", "wmem_default")))
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{process}/net/sockstat") as file:
            return int(file.readline().split()[2]) * size
    return 0


def _default_buffer(name: str) -> int:
    with suppress(OSError, ValueError):
        with open(f"/proc/sys/net/core/{name}") as file:
            return int(file.read())
    return _BUFFER


def _resident(process: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(process: int) -> int:
    """Return the resident bytes, each page divided by the number of processes that share it; without that division if
    the kernel does not report it."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) << 10
    except ProcessLookupError:
        return 0
    except OSError:
        pass
    return _resident(process)
