"""Finding what a job left running, however it tried to get away.

Invariant: orphans of a job become children of this process (it is their subreaper), so looking at our own children is
enough. A child belongs to a job when its environment or its working directory says so; in a process that runs nothing
but jobs (`exclusive`), a child that belongs to no running job is ended as well. A signal goes to the process that was
looked at, never to another that has its number by now. It imports nothing of this package, so that the janitor can load
it by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

MARKER = "SANDBOX_JOB"
"""The environment variable that names a job's directory."""
_PR_SET_CHILD_SUBREAPER = 36
_PARENT, _TERMINAL, _STARTED = 1, 4, 19
"""Fields of /proc/PID/stat, counted from the state."""
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
            if int(_status(int(name))[_PARENT]) == pid:
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
        if name.isdigit() and int(name) != os.getpid() and is_job(int(name), root):
            yield int(name)


def is_job(pid: int, root: Path) -> bool:
    """Whether it belongs to a job under `root`. A working directory alone makes no job of a process that is older than
    this one, which was there before all jobs, or that has a terminal: somebody looks at the files there."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(MARKER.encode() + b"=") and belongs(os.fsdecode(entry.partition(b"=")[2]), root):
                return True
    with suppress(OSError):
        where = os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)")
        if belongs(where, root):
            fields, ours = _status(pid), _status(os.getpid())
            return int(fields[_TERMINAL]) == 0 and int(fields[_STARTED]) >= int(ours[_STARTED])
    return False


def kill_jobs(root: Path) -> set[int]:
    """End the processes that belong to jobs under `root`; returns them. Reads all of /proc."""
    left = set(anywhere(root))
    for pid in left:
        _kill(pid, lambda pid: is_job(pid, root))
    return left


def kill_children(pids: set[int]) -> None:
    """End children of this process, and all that descends from them."""
    ours = os.getpid()
    for child in pids:
        for pid in descendants(child):
            # One whose parent is gone by now is a child of this process.
            _kill(pid, lambda pid, child=child: _parent(pid) == ours or pid in descendants(child))
        _kill(child, lambda pid: _parent(pid) == ours)


def _kill(pid: int, meant: Callable[[int], bool]) -> None:
    """The process is taken hold of first and looked at then, so that what is signalled is what was looked at."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if meant(pid):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _parent(pid: int) -> int | None:
    with suppress(OSError):
        return int(_status(pid)[_PARENT])
    return None


def _status(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on. Raises OSError."""
    # The name in brackets before them may hold anything, brackets too.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def reap(pids: set[int]) -> set[int]:
    """Collect those that are dead; returns the children that live on."""
    alive = set()
    for pid in pids:
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                alive.add(pid)
    return alive
