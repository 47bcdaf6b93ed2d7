"""The lock on a run's output folder: one run writes to a folder at a time.

Invariant: the kernel holds the lock (flock on the file `.lock`), so it ends with the process that took it, also after
kill -9. Forked children do not keep it; a child that goes on writing when this process is gone gets the descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from recipe.dag.core.errors import UserError, writing

FILE = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre mounted without `flock`."""
_held: set[int] = set()


@contextmanager
def locked(folders: Iterable[str | Path]) -> Iterator[tuple[int, ...]]:
    """Lock `folders`, created if missing, and yield the descriptors that hold the locks. Folders that were created and
    are still empty at the end are removed. Raises UserError if another run has locked one, or if one cannot be
    written."""
    with ExitStack() as stack:
        real = dict.fromkeys(os.path.realpath(folder) for folder in folders)
        yield tuple(stack.enter_context(_locked(Path(name))) for name in real)


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    created = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        with writing(folder, "; pass another folder"):
            descriptor = _acquire(folder)
        _held.add(descriptor)
        try:
            yield descriptor
        finally:
            (folder / FILE).unlink(missing_ok=True)  # while the lock is held: see _acquire
            _held.discard(descriptor)
            os.close(descriptor)
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty: the run wrote to it
                path.rmdir()


def _acquire(folder: Path) -> int:
    """Return a descriptor that holds the folder's lock. Raises OSError and UserError."""
    file = folder / FILE
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # a run that ended removed the folder, which was empty
            continue
        try:
            _flock(descriptor, folder)
            # a run that ended may have removed the file after it was opened here: then the lock is on no file
            if file.exists() and os.path.samestat(os.fstat(descriptor), os.stat(file)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "it is just starting"
        raise UserError(
            f"{folder}: another run writes to it ({holder}); wait for its end, or pass another output folder"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"warning: {folder}: its file system has no locks ({error.strerror}), so nothing keeps a second run from "
            "writing to it",
            file=sys.stderr,
        )


def _forget_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
