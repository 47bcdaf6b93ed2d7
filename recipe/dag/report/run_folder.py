"""The output folder of a run or an evaluation, read back.

Invariant: the folder is only read, and what it lacks is empty. A resumed run's later line of a step replaces the
earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ruamel.yaml import YAML

from recipe.dag.core.errors import UserError
from recipe.dag.report.episodes import read_records as read_episodes
from recipe.dag.report.evaluation_log import episode_from
from recipe.dag.report.journal import episode_files, read_records
from recipe.dag.report.jsonfile import to_json
from recipe.dag.report.run_record import launches
from recipe.dag.types.record import TOKENS, Episode

if TYPE_CHECKING:
    import pandas as pd

_ADVICE = "pass the output folder of a run"
EPISODE = ("step", "split", "uid", "index", "outcome")
"""Fields of an episode that each of its calls has in a table."""
BY_NAME = ("reward_parts", "token_columns", "usage")
"""Fields of a call with several columns of a table, `reward_parts/team` and so on."""


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

    @property
    def launch(self) -> dict[str, Any]:
        """launch.json of the last launch: its command, seed, versions, commit; {} of a folder without launches."""
        return self._of_last_launch("launch.json")

    @property
    def workflow(self) -> dict[str, Any]:
        """The workflow of the last launch as parsed, with all defaults; {} of a folder without launches."""
        return self._of_last_launch("workflow_resolved.json") or self._of_last_launch("workflow.json")

    @property
    def config(self) -> dict[str, Any]:
        """The composed configuration of the last launch; {} of a folder without launches."""
        return self._of_last_launch("config.yaml")

    def _of_last_launch(self, name: str) -> dict[str, Any]:
        file = folders[-1] / name if (folders := launches(self.folder)) else None
        if file is None or not file.is_file():
            return {}
        return YAML(typ="safe").load(file) if file.suffix == ".yaml" else read_json(file)

    def calls(self) -> pd.DataFrame:
        """Return a table with a row per recorded call, which `.to_parquet(FILE)` writes.

        A row has the episode's `step`, `split`, `uid`, `index`, `outcome` and `fault`, the call's fields, its
        `position` in `Episode.all_calls` and whether it was `kept`. Each part of the reward is a column
        (`reward_parts/team`); `parsed`, `tool_results` and `messages` are JSON."""
        import pandas as pd

        return pd.DataFrame([row for record in self.records for row in _rows(record)])

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
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    episodes = episode_files(folder)
    if not episodes and not metrics.is_file() and not summary.is_file():
        raise UserError(f"{folder}: has none of metrics.jsonl, episodes.jsonl and summary.json; {_ADVICE}")
    by_step = {line["step"]: line for line in read_records(metrics, _ADVICE)} if metrics.is_file() else {}
    return Run(
        folder,
        [by_step[step] for step in sorted(by_step)],
        list(read_episodes(folder)) if episodes else [],
        read_json(summary) if summary.is_file() else None,
    )


def read_json(file: Path) -> dict[str, Any]:
    """Raises UserError."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}); {_ADVICE}") from error


def _rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row per call of the episode, kept calls before dropped ones. A cell is a number, a text, a list of
    numbers, or empty, so that parquet holds the table as it is."""
    kept, dropped = record["calls"], record.get("dropped") or []
    about = {name: record.get(name) for name in EPISODE}
    about["fault"] = (record.get("fault") or {}).get("message")
    for position, call in enumerate([*kept, *dropped]):
        row = about | {"position": position, "kept": position < len(kept)}
        for name, value in call.items():
            row |= _cells(name, value)
        yield row


def _cells(name: str, value: Any) -> dict[str, Any]:
    if name in BY_NAME:
        return {f"{name}/{key}": item for key, item in (value or {}).items()}
    # always JSON, also if it is empty: a column has one type
    is_json = isinstance(value, list | dict) and name not in TOKENS
    return {name: to_json(value).decode() if is_json else value}
