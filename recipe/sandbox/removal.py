"""Deletes a directory that a hostile job may have filled and locked.

Invariant: nothing outside the directory changes, except the entry that names it. Everything is reached by descriptor,
never by a path that could lead elsewhere by now; symlinks are deleted, not followed; other mounts are left alone. It
imports only the standard library, so that the reaper can load it by path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: str | os.PathLike[str], directory: int | None = None) -> None:
    """Delete the directory at `path` with its content, even if a job took away its own permissions. Blocks; never
    raises: what cannot be deleted is left, and a missing directory is not an error.

    directory: a descriptor of the directory to delete; a different one at `path` is left alone.
    """
    parent, name = os.path.split(os.path.abspath(path))
    with suppress(OSError):
        above = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if directory is None:
                delete(name, above)
                return
            _unlock(directory)
            _empty(directory)
            if leads_to(name, directory, dir_fd=above):
                os.rmdir(name, dir_fd=above)
        finally:
            os.close(above)


def start_reaper(directory: str) -> subprocess.Popen[bytes]:
    """Start a process that removes the directory when its stdin is closed, at the latest at the end of this process."""
    reaper = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reaper.py")
    command = [sys.executable, "-I", "-S", "-W", "ignore", reaper, directory]
    return subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True
    )


def leads_to(path: str | os.PathLike[str], directory: int, *, dir_fd: int | None = None) -> bool:
    """Return whether `path` is the directory that a descriptor is open on, not a symlink to it."""
    try:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(status, os.fstat(directory))


def open_unlocked(name: str, above: int) -> int:
    """Open the directory `name` in `above` for reading and return its descriptor. If it belongs to this user and is
    locked, it is made 0700 first. Raises OSError, also for a symlink."""
    folder = os.open(name, os.O_PATH | _FOLDER, dir_fd=above)
    try:
        _unlock(folder)
        return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def _unlock(folder: int) -> None:
    status = os.fstat(folder)
    if status.st_mode & 0o700 != 0o700 and status.st_uid == os.geteuid():
        # fchmod refuses O_PATH descriptors; this path leads to the same directory even if it was renamed.
        os.chmod(f"/proc/self/fd/{folder}", 0o700)


def delete(name: str, above: int) -> None:
    """Delete the entry `name` of `above`, of any type. Raises OSError."""
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
    """Delete the content of a directory. Inner directories are moved up to `root` first, so that no depth exhausts the
    stack or the open files."""
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
                # A mount point cannot be moved: it is either an entry of `root`, skipped here, or stays where it is.
                if _mount(folder) == mount:
                    todo += _move_up(folder, root)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=root)


def _move_up(folder: int, root: int) -> list[str]:
    """Delete the files in `folder` and move its directories to `root`; return their names there."""
    moved = []
    for name in os.listdir(folder):
        with suppress(OSError):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                # Moving a directory needs write permission on it, since its `..` changes.
                os.close(open_unlocked(name, folder))
                fresh = f".removed-{os.urandom(8).hex()}"
                os.rename(name, fresh, src_dir_fd=folder, dst_dir_fd=root)
                moved.append(fresh)
    return moved


def _mount(descriptor: int) -> str:
    """Return the id of the mount: bind mounts of one file system share their device number."""
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        return next((line for line in file if line.startswith("mnt_id:")), "")
