"""The run's journal: `episodes.jsonl`, or compressed `episodes.jsonl.gz`, and `metrics.jsonl`.

Invariant: a line, and in the compressed file a batch of them, is written by one write and is complete or absent. After
`truncate_after(step)` the files hold exactly the lines up to that step, so a resumed run never records a step twice.
Episodes are a sample (`max_per_step`) and a convenience: a full disk loses further episodes, never the run.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.types.record import Episode

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 20_000
"""Of each text in an environment's info that a record keeps."""
_LEVEL = 6
TORN = (EOFError, zlib.error, gzip.BadGzipFile)
"""Raised where a batch of a compressed file has not been written whole, or is damaged."""


Place = tuple[int, int]
"""Of a line: the byte of the file at which a compressed batch begins, or 0, and the bytes of text between them."""
EPISODES = ("episodes.jsonl", "episodes.jsonl.gz")
"""A folder has both if it was resumed with another `report.compress`."""


def run_name(file: Path) -> str:
    """Return the name of the run that wrote `file`: its folder, after the one that contains it."""
    return "/".join(file.resolve().parent.parts[1:][-2:])


class Journal:
    """Appends to the two files in `folder`, which is created if missing. Keeps no file open."""

    def __init__(self, folder: str | Path, max_per_step: int | None = 64, *, compress: bool = False):
        """max_per_step: episodes of a step and split that are kept, without forks; None: all. Forks are kept with the
        first of them, of each all, until they are as many or more."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.episodes_path = self.folder / EPISODES[compress]
        self.metrics_path = self.folder / "metrics.jsonl"
        self.max_per_step = max_per_step
        self._written: Counter[tuple[int, str, bool]] = Counter()
        self._warned = False

    def episodes(self, step: int, episodes: Iterable[Episode], split: str = "train") -> int:
        """Write a line per episode: `step`, `split` ("train" or "validation") and the episode's fields, with long texts
        of environments cut.

        Returns the number of lines written. A file that cannot be written causes one warning.
        """
        kept = self.kept(step, episodes, split)
        lines = (to_json({"step": step, "split": split} | record_of(episode)) + b"\n" for episode in kept)
        count = 0
        try:
            if self.episodes_path.suffix == ".gz":
                if batch := list(lines):
                    append(self.episodes_path, gzip.compress(b"".join(batch), _LEVEL))
                    count = len(batch)
            else:
                for line in lines:
                    append(self.episodes_path, line)
                    count += 1
        except OSError as error:
            if not self._warned:
                logger.warning("%s: %s; episodes are not recorded until it can be written", self.episodes_path, error)
            self._warned = True
        self._written.update((step, split, episode.forked is not None) for episode in kept[:count])
        return count

    def kept(self, step: int, episodes: Iterable[Episode], split: str = "train") -> list[Episode]:
        """Return those of a step's `episodes` for which there is room. Forks are behind the episode that they
        repeat."""
        if self.max_per_step is None:
            return list(episodes)
        room, room_for_forks = (self.max_per_step - self._written[step, split, forked] for forked in (False, True))
        kept: list[Episode] = []
        with_forks = False
        for episode in episodes:
            if episode.forked is None:
                if not room:
                    break
                room, with_forks = room - 1, room_for_forks > 0
            elif with_forks:
                room_for_forks -= 1
            else:
                continue
            kept.append(episode)
        return kept

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line: `step` and all metrics, with null for values that are not finite. Raises OSError: a run that
        cannot write its metrics cannot write checkpoints either."""
        append(self.metrics_path, to_json({"step": step} | dict(metrics)) + b"\n")

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps and lines that a crash left incomplete.

        Call it once when resuming from `step`, and with -1 to start over in the same folder.
        """
        for path in (*episode_files(self.folder), self.metrics_path):
            if path.exists():
                kept = lines_until(path, step)
                replace_file(path, _compressed(kept) if path.suffix == ".gz" else kept)
        self._written = Counter({key: count for key, count in self._written.items() if key[0] <= step})


def episode_files(folder: Path) -> list[Path]:
    """Return the files of episodes in a run's output folder."""
    return [path for name in EPISODES if (path := folder / name).is_file()]


def _compressed(lines: Iterable[bytes]) -> Iterator[bytes]:
    compressor = zlib.compressobj(_LEVEL, wbits=31)  # 31: with the header of a gzip file
    for line in lines:
        yield compressor.compress(line)
    yield compressor.flush()


def record_of(episode: Episode) -> dict[str, Any]:
    """Return the fields of an episode for the journal, with long texts of environments cut."""
    fields = {name: getattr(episode, name) for name in episode.__slots__}
    return fields | {"calls": [replace(call, env_info=_shortened(call.env_info)) for call in episode.calls]}


def _shortened(value: Any) -> Any:
    """Return the info of an environment with its long texts cut: it may hold whole files, such as submissions."""
    if isinstance(value, str):
        cut = len(value) - MOST_CHARACTERS
        return value if cut <= 0 else f"{value[:MOST_CHARACTERS]}\n[... {cut} characters cut]"
    if isinstance(value, Mapping):
        return {key: _shortened(item) for key, item in value.items()}
    return [_shortened(item) for item in value] if isinstance(value, list | tuple) else value


def append(path: Path, line: bytes) -> None:
    """Append all of `line` to a file, or nothing. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(handle).st_size
        try:
            unwritten = memoryview(line)
            while unwritten:  # a short write means that the disk is full, and the next one raises
                unwritten = unwritten[os.write(handle, unwritten) :]
        except OSError:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def lines_until(path: Path, step: int) -> Iterator[bytes]:
    """Yield the complete lines whose `step` is at most this one."""
    for line, record in _parsed(path):
        if line.endswith(b"\n") and record["step"] <= step:
            yield line


def has_step(record: dict[str, Any]) -> bool:
    return isinstance(record.get("step"), int)


def read_records(
    path: Path, advice: str, valid: Callable[[dict[str, Any]], bool] = has_step
) -> Iterator[dict[str, Any]]:
    """Yield what the lines hold; a warning counts those that are not `valid`, which are left out. Raises UserError,
    ending with `advice`, if the file cannot be read or has such lines only."""
    count = 0
    try:
        for _, record in _parsed(path, valid):
            count += 1
            yield record
        empty = not path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {advice}") from error
    if not count and not empty:
        raise UserError(f"{path}: no line is a record of a run; {advice}")


def _parsed(path: Path, valid: Callable[[dict[str, Any]], bool] = has_step) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line that is a `valid` object, and the object. A warning counts the others, except for a last line
    without its end: it is being written, or a kill cut it off."""
    damaged = 0
    with _open(path) as file:
        for line in _until_torn(file):
            record = _object(line)
            if record is not None and valid(record):
                yield line, record
            elif line.endswith(b"\n") and line.strip():
                damaged += 1
    if damaged:
        logger.warning("%s: %s left out", path, counted(damaged, "damaged line"))


def read_from(file: BinaryIO, place: Place) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each complete line of an open file from a place on, and its object; None if it holds none.

    What follows the last complete line is being written. Raises OSError, and one of TORN."""
    for line in _text(file, place):
        if line.endswith(b"\n"):
            yield line, _object(line)


def read_at(path: Path, places: Iterable[Place]) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of the lines that begin at these places. Raises OSError."""
    with path.open("rb") as file, suppress(*TORN):
        for start, own in groupby(places, key=itemgetter(0)):
            text = _text(file, (start, 0))
            for _, skipped in own:
                text.seek(skipped)
                yield _object(text.readline())


def _text(file: BinaryIO, place: Place) -> BinaryIO:
    start, skipped = place
    file.seek(start)
    text = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if file.name.endswith(".gz") else file
    text.seek(skipped)
    return text


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _until_torn(file: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file; of a compressed one, those before the first batch that a kill cut off or a disk
    damaged."""
    try:
        yield from file
    except TORN as error:
        logger.warning("%s: cut off or damaged (%s); what follows is left out", getattr(file, "name", "?"), error)
