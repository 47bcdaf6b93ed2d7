"""Problem files: rows with a problem and an answer, as JSON, JSON Lines, parquet, a hub data set or a copy of one.

Invariant: all rows are checked before any is used; an error is a UserError that names file, row and key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.dag.core.errors import UserError

PROBLEM_KEYS = ("problem", "prompt", "question", "Problem", "Question")
ANSWER_KEYS = ("answer", "Answer", "solution", "response")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".json", ".jsonl", ".parquet")
DEFAULT_CONFIGURATIONS = {"openai/gsm8k": "main"}
"""Hub data sets that cannot be loaded without a configuration name -> the usual one."""


@dataclass(frozen=True, slots=True)
class Item:
    """One problem; `source` is the row that it was read from."""

    problem: str
    answer: str
    source: dict[str, Any]


def row_of(data_source: str, prompt: str, answer: str, index: int, split: str, **extra: Any) -> dict[str, Any]:
    """Return a row in verl's schema."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index, "split": split, **extra},
    }


def read_rows(
    name: str, split: str, configuration: str | None = None, *, options: str = "--prompt_split and --name"
) -> list[dict[str, Any]]:
    """Read the rows of a local file, whatever its suffix, or those of the `split` of a hub data set or of a folder laid
    out like one.

    `configuration` is `load_dataset`'s name of a part of the data set; `options` names the options that set both, for
    the error message. Raises UserError."""
    path = Path(name).expanduser()
    if path.is_file():
        rows = _read_file(path)
    elif path.is_dir():
        rows = _read_hub(str(path), split, configuration, options)
    elif _HUB_NAME.fullmatch(name) and path.suffix not in _FILE_SUFFIXES and not name.startswith("."):
        rows = _read_hub(name, split, configuration or DEFAULT_CONFIGURATIONS.get(name), options)
    else:
        raise UserError(f"{name}: no such file; pass a .json, .jsonl or .parquet file, or a hub data set (owner/name)")
    if not rows:
        raise UserError(f"{name}: contains no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{name}: row {number} is a {type(row).__name__}; each row must be an object with keys")
    return rows


def to_items(
    rows: list[dict[str, Any]],
    name: str,
    input_key: str | None,
    label_key: str | None,
    clean_answer: Callable[[str], str] = str,
    option: str = "--{}",
) -> list[Item]:
    """Return the problems and answers of the rows. `option`: how a user names a column. Raises UserError, which names
    the first row that lacks one."""
    input_key = input_key or _present(rows[0], PROBLEM_KEYS)
    label_key = label_key or _present(rows[0], ANSWER_KEYS)
    return [
        Item(
            _value(row, input_key, f"{name}: row {number}", option.format("input_key")),
            clean_answer(_value(row, label_key, f"{name}: row {number}", option.format("label_key"))),
            row,
        )
        for number, row in enumerate(rows, 1)
    ]


def _read_file(path: Path) -> list[Any]:
    try:
        data = path.read_bytes()
        if data.startswith(b"PAR1"):
            return pq.read_table(pa.BufferReader(data)).to_pylist()
        return _parse_json(data.decode("utf-8-sig"), path)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read: {reason}; pass UTF-8 JSON, JSON Lines or parquet") from error


def _parse_json(text: str, path: Path) -> list[Any]:
    """Parse a JSON list, or one JSON value per line."""
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a JSON list: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also cut at separators inside strings
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: not JSON: {error}; pass a JSON list or JSON Lines") from error
    return rows


def _read_hub(name: str, split: str, configuration: str | None, options: str) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name}: reading from the hub needs `pip install datasets`; or pass a local file") from error
    try:
        return datasets.load_dataset(name, configuration, split=split).to_list()
    except Exception as error:  # the hub client's failures have no common type
        reason = " ".join(str(error).split())[:300]
        part = f"split '{split}'" + (f" of configuration '{configuration}'" if configuration else "")
        raise UserError(f"{name}: {part} cannot be loaded as a data set: {reason}; see {options}") from error


def _present(row: dict[str, Any], keys: tuple[str, ...]) -> str:
    return next((key for key in keys if key in row), keys[0])


def _value(row: dict[str, Any], key: str, where: str, option: str) -> str:
    if key not in row:
        keys = ", ".join(map(str, row)) or "none"
        raise UserError(f"{where} has no '{key}' (its keys: {keys}); name it with {option}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise UserError(
            f"{where}: '{key}' is a {type(value).__name__}, not text or a number; name another key with {option}"
        )
    if value is None or value != value or not str(value).strip():
        raise UserError(f"{where}: '{key}' is empty or null; fix or remove the row")
    return str(value)
