"""Samples, loaded from files.

Invariant: a sample has the same keys whatever format its file has, and its order is that of the files. Which of them a
run uses, and when, is decided in sampling.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.episode.toolset import TOOLS_KWARGS
from recipe.dag.train.ground_truth import ground_truths
from recipe.dag.train.problems import ANSWER_KEYS, read_rows, row_of, to_items
from recipe.dag.train.tool_columns import columns_of

Sample = dict[str, Any]
"""prompt (messages), ground_truth, data_source, extra_info; also agent_name and tools_kwargs if the row has them, and
data_folder, the folder of its file, if `extra_info.files` names files."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Options for reading problem files that are not in verl's schema, named like those of the preprocess scripts."""

    input_key: str | None = None
    """Column of the problem; None: the first of `problems.PROBLEM_KEYS` that exists."""
    label_key: str | None = None
    """Column of the answer; None: the first of `problems.ANSWER_KEYS` that exists."""
    split: str = "train"
    """Split of a hub data set."""
    name: str | None = None
    """Configuration of a hub data set; None: its usual one."""
    answer_format: str = "auto"
    """Format of the ground truth in the answer column (`ground_truth.FORMATS`)."""
    add_prompt_suffix: str = ""


def load_samples(
    files: str | Sequence[str],
    *,
    max_samples: int | None = -1,
    what: str = "data.train_files",
    columns: Columns = Columns(),
) -> list[Sample]:
    """Read parquet files in verl's schema, or problem files as `problems.read_rows` does, and return the first
    `max_samples` samples (negative or None: all). `what` is the key that names the files. Raises UserError for a file
    that is missing, unreadable or empty, or that lacks a column."""
    samples: list[Sample] = []
    for name in [files] if isinstance(files, str) else list(files):
        path = Path(name).expanduser()
        if path.suffix and not path.exists():
            raise UserError(f"{what}: {name} does not exist; make it with a script of preprocess/")
        try:
            part = what.removesuffix("_files")
            rows = read_rows(name, columns.split, columns.name, options=f"{part}_split and {part}_name")
            answers = (columns.label_key,) if columns.label_key else ANSWER_KEYS
            if "reward_model" not in rows[0] and (
                not isinstance(rows[0].get("prompt"), list) or any(key in rows[0] for key in answers)
            ):
                rows = _in_schema(rows, name, columns)
        except UserError as error:
            raise UserError(f"{what}: {error}") from error
        missing = [column for column in ("prompt", "reward_model") if column not in rows[0]]
        if missing:
            raise UserError(f"{what}: {name} lacks the column {', '.join(missing)}; it has {', '.join(rows[0])}")
        samples += [_sample(row, f"{what}: {name} row {i}", path.parent) for i, row in enumerate(rows)]
    if not samples:
        raise UserError(f"{what}: {files} holds no rows")
    return samples if max_samples is None or max_samples < 0 else samples[:max_samples]


def _in_schema(rows: list[dict[str, Any]], name: str, columns: Columns) -> list[dict[str, Any]]:
    """Convert rows of a problem and an answer, such as {prompt, response, tools_kwargs}. Prompts that are messages stay
    messages; the columns that concern agents and tools are kept."""
    messages = {}
    if isinstance(rows[0].get("prompt"), list) and columns.input_key in (None, "prompt"):
        for number, row in enumerate(rows):
            try:
                messages[number] = prompt_of(row)
            except UserError as error:
                raise UserError(f"{name}: row {number + 1}: {error}") from error
        rows = [row | {"prompt": str(messages[number][-1]["content"])} for number, row in enumerate(rows)]
        columns = replace(columns, input_key="prompt")
    items = to_items(rows, name, columns.input_key, columns.label_key, option="data.{}=COLUMN")
    truths = ground_truths([item.answer for item in items], name, columns.answer_format)
    source, suffix = Path(name).stem, columns.add_prompt_suffix
    converted = []
    for index, (item, truth) in enumerate(zip(items, truths, strict=True)):
        row = row_of(source, item.problem + suffix, truth, index, columns.split)
        if index in messages:
            row["prompt"] = [*messages[index][:-1], messages[index][-1] | {"content": item.problem + suffix}]
        row |= {key: item.source[key] for key in ("agent_name", TOOLS_KWARGS) if item.source.get(key) is not None}
        if isinstance(extra := item.source.get("extra_info"), dict):
            row["extra_info"] |= {key: value for key, value in extra.items() if value is not None}
        converted.append(row)
    return converted


def _sample(row: dict[str, Any], where: str, folder: Path) -> Sample:
    try:
        prompt = prompt_of(row)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    reward_model = row.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if truth is None:
        raise UserError(f"{where}: reward_model.ground_truth is missing")
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise UserError(f"{where}: column extra_info must be a struct, not {type(extra).__name__}")
    # Only where something is relative to it, so that the records of other data sets are the same on every machine.
    located = {"data_folder": str(folder.absolute())} if extra.get("files") else {}
    return (
        columns_of(row, where)
        | located
        | {
            "prompt": prompt,
            "ground_truth": truth if isinstance(truth, str) else json.dumps(truth),
            "data_source": row.get("data_source") or "",
            "extra_info": {key: value for key, value in extra.items() if value is not None},
        }
    )


def prompt_of(row: Mapping[str, Any], column: str = "prompt") -> list[dict[str, Any]]:
    """Return a row's prompt as messages; a text is a user's message. Raises UserError."""
    prompt = row.get(column)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if (
        not isinstance(prompt, list)
        or not prompt
        or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    ):
        raise UserError(f"column {column} must be a list of {{role, content}} messages")
    return [dict(message) for message in prompt]
