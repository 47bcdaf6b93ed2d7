"""Opens files in a directory whose content a hostile job controls.

Invariant: no name leads out of the directory: neither `..`, nor an absolute name, nor a symlink in any component, even
one that is created at the same time. Only regular files and directories are opened, and no call blocks.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath

from recipe.sandbox import removal

_OPENAT2 = 437
"""The same number on every architecture."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
DEEPEST = 100
"""The level down to which `walk` goes, since each level makes all those below it slower to reach."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
"""Errors of the server or its machine, which no job's files cause."""


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def parts_of(name: str) -> tuple[str, ...]:
    """Return the components of a relative name. Raises ValueError if it is empty, absolute or contains `..`."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"{name!r} is not a relative name inside the directory")
    return parts


def open_beneath(directory: int, name: str, flags: int) -> int:
    """Return a descriptor of what is there. Raises ValueError for an invalid name; OSError, with ELOOP or ENOTDIR for a
    symlink."""
    parts = parts_of(name)
    if _has_openat2():
        return _openat2(directory, "/".join(parts), flags | _SAFE)
    return _walk(directory, parts, flags)


def open_file(directory: int, name: str) -> int:
    """Open a regular file for reading and return its descriptor. Raises ValueError, OSError."""
    descriptor = open_beneath(directory, name, os.O_RDONLY)
    status = os.fstat(descriptor)
    # A second link could be a file outside of the directory: a job may have linked it here.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file with one link", name)
    return descriptor


def open_folder(directory: int, parts: tuple[str, ...], *, create: bool = False, owner: int = -1) -> int:
    """Return a descriptor of the directory that `parts` lead to, which the caller closes. Directories that `create`
    adds belong to `owner`. Raises OSError."""
    current = os.dup(directory)
    for part in parts:
        try:
            created = create and _make(part, current)
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=current)
            if created:
                os.fchown(child, owner, owner)
        finally:
            os.close(current)
        current = child
    return current


def write_file(directory: int, name: str, data: bytes, owner: int = -1) -> None:
    """Write a file atomically, with the folders that lead to it; everything new belongs to `owner`. An existing file is
    replaced, not written to, since it could be a link. Raises ValueError, OSError."""
    *parents, last = parts_of(name)
    folder = open_folder(directory, tuple(parents), create=True, owner=owner)
    temporary = f".upload-{os.urandom(8).hex()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                os.fchown(descriptor, owner, owner)
            os.rename(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def extend_file(directory: int, name: str, data: bytes, offset: int) -> None:
    """Write `data` at `offset` of a regular file that has at least so many bytes, and end the file there. Raises
    ValueError, OSError."""
    descriptor = open_beneath(directory, name, os.O_WRONLY)
    with open(descriptor, "wb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_size < offset:
            raise OSError(errno.EINVAL, "not a regular file with one link and enough bytes", name)
        file.seek(offset)
        file.write(data)
        file.truncate()


def delete(directory: int, name: str) -> None:
    """Delete a file, or a folder with its content. Raises ValueError, OSError."""
    *parents, last = parts_of(name)
    folder = open_folder(directory, tuple(parents))
    try:
        removal.delete(last, folder)
    finally:
        os.close(folder)


def walk(directory: int, most: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and status of each entry below `directory`, at most `most` of them, without following symlinks.
    Directories below it that cannot be read, and the content of those at level DEEPEST, are skipped. Raises OSError if
    `directory` itself cannot be read, or for one of EXHAUSTED: what is there would be taken for missing."""
    todo = [""]
    while todo and most > 0:
        path = todo.pop()
        try:
            folder = open_beneath(directory, path, _FOLDER) if path else os.open(".", _FOLDER, dir_fd=directory)
        except OSError as error:
            if not path or error.errno in EXHAUSTED:
                raise
            continue
        children = []
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in itertools.islice(entries, most))
            for name in names:
                with suppress(OSError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    children.append((os.path.join(path, name), status))
        finally:
            os.close(folder)
        yield from children
        most -= len(names)
        if level_of(path) < DEEPEST - 1:
            todo += [name for name, status in reversed(children) if stat.S_ISDIR(status.st_mode)]


def level_of(path: str) -> int:
    """Return the number of components."""
    return path.count("/") + bool(path)


def _make(name: str, directory: int) -> bool:
    try:
        os.mkdir(name, dir_fd=directory)
    except FileExistsError:
        return False
    return True


@functools.cache
def _has_openat2() -> bool:
    """Try it: old kernels lack the call, and some containers' filters refuse it."""
    try:
        os.close(_openat2(None, ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _openat2(directory: int | None, name: str, flags: int) -> int:
    at = -100 if directory is None else directory  # AT_FDCWD
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    how = _OpenHow(flags, 0, resolve)
    path = os.fsencode(name)
    for _ in range(8):
        descriptor = _syscall(
            ctypes.c_long(_OPENAT2),
            ctypes.c_long(at),
            ctypes.c_char_p(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if descriptor >= 0:
            return descriptor
        # EAGAIN: a concurrent rename kept the kernel from checking that the path stays beneath.
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def _walk(directory: int, parts: tuple[str, ...], flags: int) -> int:
    folder = open_folder(directory, parts[:-1])
    try:
        return os.open(parts[-1], flags | _SAFE, dir_fd=folder)
    finally:
        os.close(folder)


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
