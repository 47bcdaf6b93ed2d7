"""The calls of recorded episodes as a table.

Invariant: a cell is a number, a text, a list of numbers, or empty, so that parquet holds the table as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from recipe.dag.report.jsonfile import to_json

EPISODE = ("step", "split", "uid", "index", "outcome")
"""Fields of an episode that each of its calls has."""
BY_NAME = ("reward_parts", "token_columns", "usage")
"""Fields of a call with several columns, `reward_parts/team` and so on."""
PER_TOKEN = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")
"""Fields that are lists in the table, too."""


def table_of(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row per call of the episodes, kept calls before dropped ones, as in `Episode.all_calls`."""
    return pd.DataFrame([row for record in records for row in _rows(record)])


def _rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
    is_json = isinstance(value, list | dict) and name not in PER_TOKEN
    return {name: to_json(value).decode() if is_json else value}
