"""Finds the descendants of a process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PARENT = 1
"""Position in /proc/PID/stat, counted from the state."""
_LISTS_CHILDREN = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def children(pid: int) -> set[int]:
    """Return the direct children of a process, zombies included; empty if it does not exist."""
    if not _LISTS_CHILDREN:
        return _children_by_parent(pid)
    pids: set[int] = set()
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                pids.update(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return pids


def _children_by_parent(pid: int) -> set[int]:
    """Return the same on kernels built without that list. Reads all of /proc."""
    pids = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if int(_status(int(name))[_PARENT]) == pid:
                pids.add(int(name))
    return pids


def descendants(pid: int) -> set[int]:
    pids: set[int] = set()
    todo = [pid]
    while todo:
        fresh = children(todo.pop()) - pids
        pids |= fresh
        todo.extend(fresh)
    return pids


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. Raises OSError."""
    # The name in brackets before them may contain anything, even brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
