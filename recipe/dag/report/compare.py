"""`verl-dag compare`: trained runs side by side, at equal numbers of generated tokens.

Invariant: a run is represented by one of its validations, the last one before which its training had generated at most
the budget. The budget is the same for all runs: the tokens up to the last validation of the run that generated fewest.
Everything comes from the runs' metrics.jsonl; a measure that a run does not have is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.report.journal import read_records

MEASURES = {
    "accuracy": "accuracy",
    "code_pass_rate": "code pass",
    "tool_calls": "tool calls",
    "invalid_rate": "invalid",
    "agent_calls": "agent calls",
    "tokens": "tokens",
}
"""Measure -> heading of its column. Calls and tokens are means per episode, rates are of tool calls."""


@dataclass(frozen=True, slots=True)
class Validation:
    """A validation of a run: its step, the tokens that training had generated before it, and its measures."""

    step: int
    training_tokens: int
    measures: dict[str, float]


def compare(runs: Sequence[Path], budget: int | None = None) -> dict[str, Any]:
    """Return {"budget": tokens, "runs": [{"run", "step", "training_tokens", <measure>...}]} in the order of `runs`.

    budget: tokens that training may have generated; None: as many as the run with the fewest. Raises UserError for a
    folder without metrics.jsonl, or a run without a validation within the budget.
    """
    validations = {run: read_validations(run) for run in runs}
    if budget is None:
        budget = min(run[-1].training_tokens for run in validations.values())
    rows = []
    for run, own in validations.items():
        within = [validation for validation in own if validation.training_tokens <= budget]
        if not within:
            raise UserError(
                f"{run}: its first validation comes after {own[0].training_tokens:,} generated tokens, more than the "
                f"{budget:,} that are compared; train with trainer.val_before_train=true, or raise --tokens"
            )
        last = asdict(within[-1])
        rows.append({"run": str(run), **last.pop("measures"), **last})
    return {"budget": budget, "runs": rows}


def read_validations(run: Path) -> list[Validation]:
    """Return the validations of a run in the order of their steps. Raises UserError if there is none."""
    file = run / "metrics.jsonl" if run.is_dir() else run
    # a resumed run's later line replaces the earlier one
    by_step = {line["step"]: line for line in read_records(file, "pass the output folder of a training run")}
    used, validations = 0, []
    for step in sorted(by_step):
        line = by_step[step]
        used += int(line.get("tokens/sampled") or 0)
        if "val/accuracy" in line:
            validations.append(Validation(step, used, measures_of(line)))
    if not validations:
        raise UserError(f"{file}: holds no validation with graded episodes; train with data.val_files and test_freq")
    return validations


def measures_of(line: Mapping[str, float]) -> dict[str, float]:
    """Return the measures of a line with `val/` metrics. Rates of several agents are weighted by their tool calls."""
    agents = {key.split("/")[2] for key in line if key.startswith("val/agent/")}
    calls = {agent: line.get(f"val/agent/{agent}/calls", 0) for agent in agents}
    tool_calls = {agent: line.get(f"val/agent/{agent}/tool_calls", 0) * calls[agent] for agent in agents}
    invalid = {agent: line.get(f"val/agent/{agent}/invalid_calls", 0) for agent in agents}
    # a call that was refused did not run, so it is neither a success nor a failure of code
    success = [
        (rate, tool_calls[agent] * (1 - invalid[agent]))
        for agent in agents
        if (rate := line.get(f"val/agent/{agent}/tool_success")) is not None
    ]
    measures = {"accuracy": line["val/accuracy"]}
    if episodes := line.get("val/episode/count"):
        measures["agent_calls"] = sum(calls.values()) / episodes
        measures["tokens"] = line.get("val/tokens/sampled", 0) / episodes
        if any(f"val/agent/{agent}/tool_calls" in line for agent in agents):
            measures["tool_calls"] = sum(tool_calls.values()) / episodes
    if (rate := _weighted(success)) is not None:
        measures["code_pass_rate"] = rate
    if (rate := _weighted((invalid[agent], tool_calls[agent]) for agent in agents)) is not None:
        measures["invalid_rate"] = rate
    return measures


def lines_of(comparison: Mapping[str, Any]) -> list[str]:
    """Return the comparison as lines of a table."""
    heading = ["run", "step", "training tokens", *MEASURES.values()]
    rows = [
        [row["run"], str(row["step"]), f"{row['training_tokens']:,}", *(_shown(key, row.get(key)) for key in MEASURES)]
        for row in comparison["runs"]
    ]
    return [
        f"Each run at its last validation after at most {comparison['budget']:,} generated tokens of training.",
        *aligned([heading, *rows]),
        "Calls and tokens per episode of that validation; code pass: share of programs that ran without an error; "
        "invalid: share of tool calls that could not be run.",
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _weighted(pairs: Iterable[tuple[float, float]]) -> float | None:
    pairs = list(pairs)
    weight = sum(part for _, part in pairs)
    return sum(value * part for value, part in pairs) / weight if weight else None


def _shown(measure: str, value: float | None) -> str:
    if value is None:
        return "-"
    if measure in ("accuracy", "code_pass_rate", "invalid_rate"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if measure == "tokens" else f"{value:.2f}"
