"""The directories of sessions, and plain folders as such.

Invariant: whatever a program did to its directory, the server can measure it, hand it to the next job and remove it. A
`Folder` is for isolations that cannot mount: its quota is measured, not enforced (see `jail.tmpfs`, which enforces it).
"""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from recipe.sandbox import beneath, removal


class Place(ABC):
    """A directory that outlasts jobs.

    descriptor: of the directory; closed by `remove`. owner: the user that jobs run as; -1: this process's.
    """

    enforced = True
    """Whether the kernel enforces the quota."""

    def __init__(self, descriptor: int, owner: int):
        self._descriptor = descriptor
        self.owner = owner

    @property
    def full(self) -> bool:
        """Whether the kernel refuses further bytes or entries."""
        return False

    @property
    def lost(self) -> bool:
        """Whether the content is gone, because the process that kept it died."""
        return False

    def directory(self) -> int:
        """Return the descriptor, after the mode, which a job may have changed, is restored."""
        os.fchmod(self._descriptor, 0o700)
        return self._descriptor

    @abstractmethod
    async def for_job(self, *, read_only: bool) -> int:
        """Return a descriptor for one job's jail, which the caller closes. Raises SandboxError."""

    @abstractmethod
    async def used(self) -> int:
        """Return the bytes in use."""

    async def settle(self) -> list[str]:
        """Remove what was added or changed since the last call while the quota is exceeded, and return the names. The
        rest is what was there before to the next call. Raises OSError."""
        return []

    def remove(self) -> None:
        """Begin to delete everything. Never raises."""
        os.close(self._descriptor)


class Store(Protocol):
    async def create(self, quota_bytes: int) -> Place:
        """Return a new, empty place. Raises SandboxError."""
        ...

    def close(self) -> None: ...


def most_entries(quota_bytes: int) -> int:
    """Return the number of files and directories that a place may hold: each takes about 1 KiB of kernel memory that
    no quota counts."""
    return max(1000, quota_bytes >> 14)


class Folder(Place):
    """A plain folder. It counts as over its quota if it has too many or too deeply nested entries to measure. Unlinked
    files that a running job holds are not seen."""

    enforced = False

    def __init__(self, path: Path, quota_bytes: int):
        super().__init__(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), owner=-1)
        self.path = path
        self._quota_bytes = quota_bytes
        self._settled: frozenset[int] = frozenset()
        """What was there after the last `settle`, as `_identity` tells it."""

    async def for_job(self, *, read_only: bool) -> int:
        return os.dup(self.directory())

    async def used(self) -> int:
        return await asyncio.to_thread(self._measure)

    async def settle(self) -> list[str]:
        return await asyncio.to_thread(self._settle)

    def remove(self) -> None:
        super().remove()
        asyncio.get_running_loop().run_in_executor(None, removal.remove, self.path)

    def _measure(self) -> int:
        most, size, entries = most_entries(self._quota_bytes), 0, 0
        for name, status in self._entries():
            size, entries = size + status.st_blocks * 512, entries + 1
            if entries > most or beneath.level_of(name) == beneath.DEEPEST:
                return max(size, self._quota_bytes + 1)
        return size

    def _settle(self) -> list[str]:
        removed: list[str] = []
        if (excess := self._measure() - self._quota_bytes) > 0:
            removed += self._remove_largest(excess)
            # Folders or the number of entries may be the excess: all that is new goes. Last, everything does: a file
            # can grow and pose as unchanged, and a folder that stays too full serves no program.
            for known in (self._settled, frozenset[int]()):
                if self._measure() > self._quota_bytes:
                    removed += _remove_others(self.directory(), known)
        self._settled = frozenset(_identity(name, status) for name, status in self._entries())
        return removed

    def _remove_largest(self, excess: int) -> list[str]:
        """Delete new and changed files, the largest first, until `excess` bytes are free; return their names."""
        directory, removed = self.directory(), []
        files = [(name, status) for name, status in self._entries() if not stat.S_ISDIR(status.st_mode)]
        for name, status in sorted(files, key=lambda file: -file[1].st_blocks):
            if excess > 0 and _identity(name, status) not in self._settled:
                with suppress(OSError):
                    beneath.delete(directory, name)
                    removed.append(name)
                    excess -= status.st_blocks * 512
        return removed

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        return beneath.walk(self.directory(), most_entries(self._quota_bytes) + 1)


class Folders:
    """Makes folders under `root`, an existing directory."""

    def __init__(self, root: Path):
        self._root = root

    async def create(self, quota_bytes: int) -> Folder:
        return Folder(Path(tempfile.mkdtemp(prefix="session-", dir=self._root)), quota_bytes)

    def close(self) -> None:
        """Nothing to end: the folders are removed with their sessions."""


def _identity(name: str, status: os.stat_result) -> int:
    """Return what tells an entry from another one and from itself after a change; a directory stays the same whatever
    it holds. It is a hash, since a place may have thousands of names."""
    content = () if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
    return hash((name, status.st_ino, content))


def _remove_others(folder: int, known: frozenset[int], path: str = "") -> list[str]:
    """Delete the entries below a directory that are not `known`, whatever they hold; return their names. Known
    directories that cannot be read are skipped, as in `walk`. Recurses as deep as known ones are, at most DEEPEST."""
    removed: list[str] = []
    for entry in sorted(os.listdir(folder)):
        with suppress(OSError):
            name, status = os.path.join(path, entry), os.stat(entry, dir_fd=folder, follow_symlinks=False)
            if _identity(name, status) not in known:
                beneath.delete(folder, entry)
                removed.append(name)
            elif stat.S_ISDIR(status.st_mode):
                child = beneath.open_folder(folder, (entry,))
                try:
                    os.fchmod(child, stat.S_IMODE(status.st_mode) | 0o700)
                    removed += _remove_others(child, known, name)
                finally:
                    os.close(child)
    return removed
