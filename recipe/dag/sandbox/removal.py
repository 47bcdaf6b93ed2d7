"""Deleting a directory that a job may have filled with traps and locked.

Invariant: nothing outside the directory changes, but for the entry that names it. Everything is reached by descriptor,
never by a path that could lead elsewhere by now; symlinks are deleted, not followed; other mounts are left alone. It
uses the standard library only and imports nothing of this package, so that the janitor can load it by itself.
"""

from __future__ import annotations

import os
from contextlib import suppress

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: str | os.PathLike[str], meant: int | None = None) -> None:
    """Delete the directory at `path` with all that it holds, also where a job took away its own permissions. Blocks;
    never raises: what cannot be deleted is left, and a directory that is gone already is nothing to do.

    meant: a descriptor of the directory that was made there; a different one of that name is left alone.
    """
    parent, name = os.path.split(os.path.abspath(path))
    with suppress(OSError):
        above = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if meant is None:
                _delete(name, above)
                return
            _unlock(meant)
            _empty(meant)
            if leads_to(name, meant, dir_fd=above):
                os.rmdir(name, dir_fd=above)
        finally:
            os.close(above)


def leads_to(path: str | os.PathLike[str], directory: int, *, dir_fd: int | None = None) -> bool:
    """Whether `path` is the directory that a descriptor is open on, by no symlink."""
    try:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(status, os.fstat(directory))


def identity(status: os.stat_result) -> str:
    """What tells a file from others that had or will have its name. The number of a deleted one is soon given again, so
    the time when it was made counts."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}"


def unlink(path: str | bytes, meant: str) -> None:
    """Delete the file with that identity; another of that name is left alone. Never raises."""
    with suppress(OSError):
        if identity(os.lstat(path)) == meant:
            os.unlink(path)


def open_unlocked(name: str, above: int) -> int:
    """A descriptor of the directory `name` in `above`, to read. One of this user's that is locked is made 0700 first.
    Raises OSError, also for a symlink."""
    folder = os.open(name, os.O_PATH | _FOLDER, dir_fd=above)
    try:
        _unlock(folder)
        return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def _unlock(folder: int) -> None:
    status = os.fstat(folder)
    if status.st_mode & 0o700 != 0o700 and status.st_uid == os.geteuid():
        # fchmod refuses O_PATH descriptors; this leads to the same directory, whatever happened to its name.
        os.chmod(f"/proc/self/fd/{folder}", 0o700)


def _delete(name: str, above: int) -> None:
    """Delete one entry of `above`, whatever it is. Raises OSError."""
    try:
        os.unlink(name, dir_fd=above)
        return
    except IsADirectoryError:
        root = open_unlocked(name, above)
    try:
        _empty(root)
    finally:
        os.close(root)
    os.rmdir(name, dir_fd=above)


def _empty(root: int) -> None:
    """Delete what the directory holds. Inner directories move up to `root` first, so that no depth is too much for the
    stack or the number of open files."""
    mount, todo = _mount(root), os.listdir(root)
    while todo:
        name = todo.pop()
        with suppress(OSError):
            try:
                os.unlink(name, dir_fd=root)
                continue
            except IsADirectoryError:
                folder = open_unlocked(name, root)
            try:
                # A mount point cannot be moved, so one shows here, as an entry of `root`, or stays where it is.
                if _mount(folder) == mount:
                    todo += _move_up(folder, root)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=root)


def _move_up(folder: int, root: int) -> list[str]:
    """Delete the files in `folder` and move its directories to `root`; returns their names there."""
    moved = []
    for name in os.listdir(folder):
        with suppress(OSError):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                # To move a directory its own permission to write is needed, since its `..` changes.
                os.close(open_unlocked(name, folder))
                fresh = f".removed-{os.urandom(8).hex()}"
                os.rename(name, fresh, src_dir_fd=folder, dst_dir_fd=root)
                moved.append(fresh)
    return moved


def _mount(descriptor: int) -> str:
    """Which mount it is in: bind mounts of one file system share their device number."""
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        return next((line for line in file if line.startswith("mnt_id:")), "")
