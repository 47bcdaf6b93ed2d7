"""The episodes of an evaluation, on disk as soon as each ends: `episodes.jsonl`, which `verl-dag trace` reads, too.

Invariant: an episode without a fault is never run twice in one folder, unless what determines it has changed: the
workflow, its files, the models, the problems or the seed. Those are recorded in `evaluation.json`, written before the
first episode; the file of another evaluation is renamed. A line that a crash left incomplete counts as not run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.dag.core.counted import counted
from recipe.dag.report.journal import append, lines_until
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.types.record import Call, Episode, Result, Skip, ToolResult

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""An episode's `uid` and index."""


class EvaluationLog:
    """Opens the log in `folder`, which is created if missing. identity: JSON that determines the episodes."""

    def __init__(self, folder: str | Path, identity: Mapping[str, Any]):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "episodes.jsonl"
        self.finished: dict[Key, Episode] = {}
        """The episodes without a fault that an earlier run left."""
        self.added: list[Episode] = []
        """The episodes of this run, those with a fault included."""
        self._unused: list[Episode] = []
        """Finished episodes beyond the limit."""
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
        mark = folder / "evaluation.json"
        if _digest_in(mark) == digest:
            self._read()
        else:
            self._set_aside()
        replace_file(self.path, [_line(episode) for episode in self.finished.values()])
        replace_file(mark, [to_json({"digest": digest}), b"\n"])

    def add(self, episode: Episode) -> None:
        """Append one episode. Raises OSError: an evaluation that cannot be recorded is not worth its cost."""
        append(self.path, _line(episode))
        self.added.append(episode)

    def limit(self, n: int) -> None:
        """Use no more than `n` finished episodes per problem; the file keeps the others."""
        self._unused += [episode for key, episode in self.finished.items() if key[1] >= n]
        self.finished = {key: episode for key, episode in self.finished.items() if key[1] < n}

    def rewrite(self) -> None:
        """Write all episodes again, since their groups have been scored: an episode is recorded when it ends, before
        the rest of its group has."""
        episodes = (*self._unused, *self.finished.values(), *self.added)
        replace_file(self.path, [_line(episode) for episode in episodes])

    def _set_aside(self) -> None:
        """Rename a file of another evaluation: its episodes may have been expensive."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        number = next(n for n in itertools.count(1) if not self.path.with_name(f"episodes.{n}.jsonl").exists())
        aside = self.path.with_name(f"episodes.{number}.jsonl")
        self.path.rename(aside)
        print(f"{self.path}: was of another evaluation (workflow, models, problems or seed); it is {aside.name} now")

    def _read(self) -> None:
        if not self.path.exists():
            return
        damaged = 0
        for line in lines_until(self.path, 0):
            try:
                episode = episode_from(json.loads(line))
            except (TypeError, AttributeError):  # a field of another type, or one is missing
                damaged += 1
                continue
            if episode.fault is None:
                self.finished[episode.uid, episode.index] = episode
        if damaged:
            logger.warning("%s: %s left out; their episodes are run again", self.path, counted(damaged, "damaged line"))


def episode_from(fields: dict[str, Any]) -> Episode:
    """Return the episode that `Episode.to_json` wrote; fields of later versions are ignored. Raises TypeError or
    AttributeError for other data."""
    episode = _make(Episode, fields)
    types = {"uid": str, "index": int, "sample": dict, "info": dict, "outcome": int | float | None}
    for name, type_ in types.items():
        if not isinstance(getattr(episode, name), type_):
            raise TypeError(f"{name}: {getattr(episode, name)!r}")
    episode.calls = [_make(Call, call) for call in episode.calls]
    episode.dropped = [_make(Call, call) for call in episode.dropped]
    for call in episode.all_calls:
        call.tool_results = [_make(ToolResult, result) for result in call.tool_results]
    episode.results = [_make(Result, result) for result in episode.results]
    episode.skips = [_make(Skip, skip) for skip in episode.skips]
    return episode


def _make(kind: Any, fields: Mapping[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in known})


def _line(episode: Episode) -> bytes:
    fields = {name: getattr(episode, name) for name in episode.__slots__}
    return to_json({"step": 0, "split": "validation"} | fields) + b"\n"


def _digest_in(path: Path) -> str | None:
    try:
        return json.loads(path.read_text())["digest"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
