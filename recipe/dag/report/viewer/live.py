"""The page's data of a run while it is written: `verl-dag watch`.

Invariant: the folder is only read, and each complete line once; what is not complete yet is read later. A journal that
a resume has replaced is read anew, under another version, so nobody adds its episodes to those of before.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from recipe.dag.core.errors import UserError
from recipe.dag.report.episodes import is_episode
from recipe.dag.report.journal import EPISODES, TORN, Place, has_step, read_at, read_from
from recipe.dag.report.run_folder import Run, read_json
from recipe.dag.report.run_record import launches
from recipe.dag.report.viewer.payload import Payload, chunk_of
from recipe.dag.report.viewer.vocabulary import vocabularies


class _Tail:
    """What was not read yet of a file that grows. The file stays open, so one in its place has another inode."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: Place = 0, 0
        self._size = 0
        self._file: BinaryIO | None = None

    def is_replaced(self) -> bool:
        if self._file is None:
            return False
        try:
            now = self.path.stat()
        except OSError:
            return True
        return not os.path.samestat(now, os.fstat(self._file.fileno())) or now.st_size < self._size

    def new(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Yield the objects in new lines, each with the place of its line."""
        with suppress(OSError):  # missing, or removed in this moment
            if self._file is None:
                self._file = self.path.open("rb")
                weakref.finalize(self, self._file.close)
            size = os.fstat(self._file.fileno()).st_size
            if size == self._size or self.is_replaced():
                return
            with suppress(*TORN):
                for line, record in read_from(self._file, self._place):
                    place = start, skipped = self._place
                    self._place = start, skipped + len(line)
                    if record is not None:
                        yield place, record
                if self.path.suffix == ".gz":  # all batches are whole, and the next one begins here
                    self._place = self._file.tell(), 0
            self._size = size


class LiveRun:
    """A run's folder, which may not exist yet. Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin()

    def _begin(self) -> None:
        self._generation = time.time_ns()
        self._payload = Payload()
        self._episodes = [_Tail(self.folder / name) for name in EPISODES]
        self._metrics = _Tail(self.folder / "metrics.jsonl")
        self._by_step: dict[int, dict[str, Any]] = {}
        self._lines = 0

    def news(self, since: str = "") -> dict[str, Any] | None:
        """Return the index with the `version` of its data, or what it has more than the version `since`; None without
        news. `from` says at which episode and problem the lists begin."""
        self._refresh()
        summary = self._summary()
        run = Run(self.folder, [self._by_step[step] for step in sorted(self._by_step)], [], summary)
        counts = [self._generation, len(self._payload.episodes), len(self._payload.problems)]
        state = [self._lines, len(launches(self.folder)), int(summary is not None)]
        version = ".".join(map(str, counts + state))
        if since == version:
            return None
        generation, *start = (int(word) for word in since.split(".")[:3]) if since else (0, 0, 0)
        episodes, problems = start if generation == self._generation else (0, 0)
        index = self._payload.index(run)
        tails = {"episodes": index["episodes"][episodes:], "problems": index["problems"][problems:]}
        return {**index, **tails, "from": {"episodes": episodes, "problems": problems}, "version": version}

    def part(self, name: str) -> Any:
        """Return `vocabularies` or `chunk-N`. Raises KeyError if there is none of that name, or no longer."""
        if name == "vocabularies":
            return vocabularies(Run(self.folder, [], [], None), self._payload.tokens)
        sources = {f"chunk-{number}": own for number, own in enumerate(self._payload.chunks)}[name]
        records: list[Any] = []
        with suppress(OSError):
            for path, own in groupby(sources, key=itemgetter(0)):
                records += read_at(path, (place for _, place in own))
        if len(records) < len(sources) or not all(record is not None and is_episode(record) for record in records):
            raise KeyError(name)  # the file was replaced
        return chunk_of(records)

    def _refresh(self) -> None:
        if any(tail.is_replaced() for tail in (*self._episodes, self._metrics)):
            self._begin()
        for tail in self._episodes:
            for place, record in tail.new():
                if is_episode(record):
                    self._payload.add(record, (tail.path, place))
        for _, line in self._metrics.new():
            if has_step(line):
                self._by_step[line["step"]] = line
                self._lines += 1

    def _summary(self) -> dict[str, Any] | None:
        file = self.folder / "summary.json"
        try:
            return read_json(file) if file.is_file() else None
        except UserError:  # it is being written
            return None
