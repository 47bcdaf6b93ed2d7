"""`api_usage.json`: what the API policies of a run have consumed, interruptions included.

Invariant: the file is complete or absent, and its counts never shrink while a run goes on from where it was. Budgets
are held against them, so a file that cannot be read is an error, not an empty one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.report.jsonfile import replace_file, to_json

NAME = "api_usage.json"
Totals = dict[str, dict[str, float]]
"""By policy, then by count (`remote.ledger.COUNTS`)."""


def write_api_usage(folder: str | Path, totals: Totals) -> None:
    """Replace the file, unless there is nothing to write. Raises OSError."""
    if totals:
        Path(folder).mkdir(parents=True, exist_ok=True)
        replace_file(Path(folder) / NAME, [to_json(totals, indent=1)])


def read_api_usage(folder: str | Path) -> Totals:
    """Return the counts in a run's output folder; empty without a file. Raises UserError."""
    path = Path(folder) / NAME
    if not path.exists():
        return {}
    try:
        return totals_of(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); it holds what the run has spent. Delete it to count from zero"
        ) from error


def totals_of(data: Any) -> Totals:
    """Return decoded counts. Raises ValueError if they are none."""
    counts = data.values() if isinstance(data, Mapping) else [None]
    if not all(
        isinstance(each, Mapping) and all(isinstance(value, int | float) for value in each.values()) for each in counts
    ):
        raise ValueError("expected counts by policy")
    return {policy: dict(each) for policy, each in data.items()}


def larger(first: Totals, second: Totals) -> Totals:
    """Return the larger of each count: two records of one run, of which one may be older."""
    both: Totals = {}
    for policy in {**first, **second}:
        left, right = first.get(policy, {}), second.get(policy, {})
        both[policy] = {name: max(left.get(name, 0.0), right.get(name, 0.0)) for name in {**left, **right}}
    return both
