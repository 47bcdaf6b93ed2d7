"""A job's own directory.

Invariant: no name leads out of it, neither by `..` nor by a symlink that the job made, and nothing of it stays behind.
"""

from __future__ import annotations

import base64
import binascii
import glob
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from recipe.dag.sandbox import removal

_FETCH_BYTES = 16 << 20
"""All fetched files of a job together."""


SKIPPED = "IGNORE_THIS_FILE"
"""SandboxFusion writes no file with this in its name."""
_GLOB = re.compile(r"[*?[]")
_MATCHES = 1000
"""Of one pattern, at most."""


class SandboxError(Exception):
    """The job could not be set up: what is missing or wrong. Not a result of its code."""


def create(root: Path) -> Path:
    """A fresh directory, mode 0700."""
    return Path(tempfile.mkdtemp(prefix="job-", dir=root))


def write_files(directory: Path, files: Mapping[str, str | None]) -> None:
    """Write base64 contents under relative names; None is skipped. Raises SandboxError."""
    for name, content in files.items():
        if content is None or SKIPPED in name:
            continue
        path = _inside(directory, name)
        try:
            data = base64.b64decode(content, validate=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except (binascii.Error, ValueError, OSError) as error:
            raise SandboxError(f"files: {name!r}: {error}") from error


def fetch_files(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Regular files as base64 by the name asked for, or by each name that a pattern (`*`, `?`, `[...]`, `**`) matches;
    others are left out. Call it when the job is dead."""
    found: dict[str, str] = {}
    left = _FETCH_BYTES
    for name in dict.fromkeys(match for asked in names for match in _matches(directory, asked)):
        try:
            path = _inside(directory, name)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (SandboxError, OSError):
            continue
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            inside = path.parent.resolve().is_relative_to(directory.resolve())
            if inside and stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size <= left:
                found[name] = base64.b64encode(file.read(left)).decode()
                left -= status.st_size
    return found


def _matches(directory: Path, name: str) -> list[str]:
    if not _GLOB.search(name) or "\0" in name or (directory / name).exists():
        return [name]
    return sorted(itertools.islice(glob.iglob(name, root_dir=directory, recursive=True), _MATCHES))


def remove(directory: Path) -> None:
    """Delete it, also where the job took away its own permissions; nothing else changes. Blocks; never raises."""
    removal.remove(directory)


def _inside(directory: Path, name: str) -> Path:
    parts = Path(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise SandboxError(f"files: {name!r} must be a relative name inside the working directory")
    return directory / name
