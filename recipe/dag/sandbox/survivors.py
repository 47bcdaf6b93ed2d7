"""Finding what a job left running, however it tried to get away.

Invariant: orphans of a job become children of this process (it is their subreaper), so looking at our own children is
enough. A child belongs to a job when its environment or its working directory says so; in a process that runs nothing
but jobs (`exclusive`), a child that belongs to no running job is ended as well.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARKER = "SANDBOX_JOB"
"""The environment variable that names a job's directory."""
_PR_SET_CHILD_SUBREAPER = 36
_LISTS_CHILDREN = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def become_subreaper() -> None:
    """Have orphaned descendants handed to this process, not to init. Raises OSError where the kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children(pid: int) -> set[int]:
    """Direct children, zombies included; empty when it is gone."""
    if not _LISTS_CHILDREN:
        return _children_by_parent(pid)
    found: set[int] = set()
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found.update(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def _children_by_parent(pid: int) -> set[int]:
    """For kernels built without the list: reads all of /proc."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            # The name in brackets may hold anything, brackets too.
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(name))
    return found


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        fresh = children(todo.pop()) - found
        found |= fresh
        todo.extend(fresh)
    return found


def owner(pid: int) -> str | None:
    """The job directory that a process carries in its environment, or works in; None when neither can be read."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(MARKER.encode() + b"="):
                return os.fsdecode(entry.partition(b"=")[2])
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)")
    return None


def belongs(where: str | None, directory: Path) -> bool:
    return where is not None and (where == str(directory) or where.startswith(f"{directory}/"))


def anywhere(root: Path) -> Iterator[int]:
    """Processes that belong to a job under `root`. Reads all of /proc: for clearing up after a crash."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and belongs(owner(int(name)), root):
            yield int(name)


def kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def reap(pids: set[int]) -> set[int]:
    """Collect those that are dead; returns the children that live on."""
    alive = set()
    for pid in pids:
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                alive.add(pid)
    return alive
