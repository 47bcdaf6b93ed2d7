"""Writes and reads a job's files inside its jail, and carries them between the jail and the server.

Invariant: files are written and read with the job's own rights, in its own view of the file system, before its program
starts or after all of its processes are dead. So a name, or a symlink, reaches only what the program could reach
itself. Whatever the program left behind, `fetch` ends within a few seconds.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping

SKIPPED = "IGNORE_THIS_FILE"
"""As in SandboxFusion, a file with this in its name is not written."""
FETCH_BYTES = 16 << 20
"""Limit on all fetched files of a job together."""
_MATCHES = 1000
"""Limit on the matches of one pattern."""
_VISITS = 200_000
"""Limit on the names looked at for all patterns of a job together."""
_FETCH_S = 3.0


class BadFile(Exception):
    """A file cannot be written. The message names the file and the reason."""


def write(files: Mapping[str, str]) -> None:
    """Write base64 contents under names relative to the working directory. Raises BadFile."""
    import base64  # here and below: few jobs need it, and every job pays for the modules of its zygote
    import binascii

    for name, content in files.items():
        try:
            data = base64.b64decode(content, validate=True)
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "wb", opener=_opener) as file:
                file.write(data)
        except (binascii.Error, ValueError, OSError) as error:
            raise BadFile(f"files: {_short(name)}: {error}") from error


def write_whole(name: str, data: bytes) -> None:
    """Write a new file. Raises OSError if it exists."""
    descriptor = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o666)
    while data:
        data = data[os.write(descriptor, data) :]
    os.close(descriptor)


def pack(contents: Mapping[str, str], descriptor: int) -> None:
    """Write ASCII texts by name into a file: a line with their sizes, then the texts. As one JSON document they would
    keep the server's event loop waiting, since its parser does not release the interpreter lock."""
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps({name: len(text) for name, text in contents.items()}).encode() + b"\n")
        for text in contents.values():
            file.write(text.encode("ascii", "replace"))


def unpack(descriptor: int) -> dict[str, str]:
    """Return what `pack` wrote."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return {name: file.read(size).decode("ascii") for name, size in json.loads(file.readline()).items()}


def fetch(names: Iterable[str]) -> dict[str, str]:
    """Return regular files as base64 by the requested name, or by each name that matches a pattern (`*`, `?`, `[...]`,
    `**`). Files that are missing, not regular or too large are skipped, as is the rest after _FETCH_S."""
    import base64

    files: dict[str, str] = {}
    remaining = FETCH_BYTES
    ticks = _ticks(time.monotonic() + _FETCH_S)
    matches = (match for pattern, _ in zip(names, ticks, strict=False) for match in _matches(pattern, ticks))
    for name, _ in zip(dict.fromkeys(matches), ticks, strict=False):
        data = _read(name, remaining)
        if data is not None:
            files[name] = base64.b64encode(data).decode()
            remaining -= len(data)
    return files


def _read(name: str, limit: int) -> bytes | None:
    """Return the content of a regular file; None if there is none or it has more than `limit` bytes."""
    try:
        name.encode()  # an answer is JSON: names that are not UTF-8 cannot be in it
        # As in SandboxFusion, "x/../a" needs no directory x. O_NONBLOCK, since a FIFO would block.
        descriptor = os.open(os.path.normpath(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(descriptor)
        # Files of /proc show what this process may see, not what the program could.
        if not stat.S_ISREG(status.st_mode) or status.st_dev == os.stat("/proc").st_dev or status.st_size > limit:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _ticks(until: float) -> Iterator[None]:
    """Yield once for each name that may still be looked at."""
    for _ in range(_VISITS):
        if time.monotonic() > until:
            return
        yield


def _matches(pattern: str, ticks: Iterator[None]) -> list[str]:
    """Return the name itself, or the files that match it, sorted. Like `glob`, a pattern skips hidden names unless it
    begins with a dot; unlike `glob`, it does not follow symlinked directories, which may lead in circles."""
    if not set("*?[") & set(pattern) or "\0" in pattern or os.path.lexists(pattern):
        return [pattern]
    parts = pattern.split("/")
    if parts[-1] == "**":
        parts.append("*")
    paths: list[str] = []
    # Not a recursive function: a program can nest directories deeper than the interpreter can call.
    todo = [("", 0)]
    while todo and len(paths) < _MATCHES:
        prefix, position = todo.pop()
        part, last = parts[position], position == len(parts) - 1
        if not last and not set("*?[") & set(part):
            todo.append((f"{prefix}{part}/", position + 1))
        elif part == "**":
            todo.append((prefix, position + 1))
            todo += [
                (f"{prefix}{entry.name}/", position) for entry in _entries(prefix, "*", ticks) if _is_folder(entry)
            ]
        elif last:
            paths += [prefix + entry.name for entry in _entries(prefix, part, ticks) if not _is_folder(entry)]
        else:
            entries = _entries(prefix, part, ticks)
            todo += [(f"{prefix}{entry.name}/", position + 1) for entry in entries if _is_folder(entry)]
    return sorted(paths)[:_MATCHES]


def _entries(prefix: str, part: str, ticks: Iterator[None]) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a directory whose names match one part of a pattern."""
    import fnmatch

    try:
        with os.scandir(prefix or ".") as entries:
            for entry, _ in zip(entries, ticks, strict=False):
                if entry.name.startswith(".") <= part.startswith(".") and fnmatch.fnmatchcase(entry.name, part):
                    yield entry
    except OSError:
        return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _opener(name: str, flags: int) -> int:
    # O_NONBLOCK, since a FIFO that an earlier job left in a session would block.
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _short(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:100] + "...")
