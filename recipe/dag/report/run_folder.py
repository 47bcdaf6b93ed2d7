"""The output folder of a run or an evaluation, read back.

Invariant: the folder is only read, and what it lacks is empty. A resumed run's later line of a step replaces the
earlier one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recipe.dag.core.errors import UserError
from recipe.dag.report.evaluation_log import episode_from
from recipe.dag.report.journal import read_records
from recipe.dag.report.trace import read_records as read_episodes
from recipe.dag.types.record import Episode

_ADVICE = "pass the output folder of a run"


@dataclass(frozen=True, slots=True)
class Run:
    """The output of a run."""

    folder: Path
    metrics: list[dict[str, Any]]
    """One entry per step, in order, with its number as `step`; a value that was not finite is None."""
    records: list[dict[str, Any]]
    """The lines of episodes.jsonl: the fields of an episode, its `step`, its `split`."""
    summary: dict[str, Any] | None
    """summary.json of an evaluation."""

    def episodes(
        self, *, step: int | None = None, split: Literal["train", "validation"] | None = None
    ) -> list[Episode]:
        """Return the recorded episodes, of one step or split alone if that is given."""
        return [
            episode_from(record)
            for record in self.records
            if step in (None, record.get("step")) and split in (None, record.get("split", "train"))
        ]


def read_run(folder: Path) -> Run:
    """Return what a run wrote into `folder`. Raises UserError if none of its files is there, or one is damaged."""
    metrics, episodes, summary = (folder / name for name in ("metrics.jsonl", "episodes.jsonl", "summary.json"))
    if not any(file.is_file() for file in (metrics, episodes, summary)):
        raise UserError(f"{folder}: has none of metrics.jsonl, episodes.jsonl and summary.json; {_ADVICE}")
    by_step = {line["step"]: line for line in read_records(metrics, _ADVICE)} if metrics.is_file() else {}
    return Run(
        folder,
        [by_step[step] for step in sorted(by_step)],
        list(read_episodes(folder)) if episodes.is_file() else [],
        _summary(summary) if summary.is_file() else None,
    )


def _summary(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}); {_ADVICE}") from error
