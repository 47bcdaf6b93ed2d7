"""Compare the stages of a run: accuracy of base, SFT and GRPO with intervals, printed and as table.json.

    python -m recipe.retool.table outputs/NAME

Invariant: a figure comes from the results.json of that stage's evaluation alone. Intervals are 95 % intervals
over problems. Episodes that ended in an error are no wrong answers; they are counted beside the accuracy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.pass_table import intervals, read_graded
from recipe.dag.train.data_script import run

STAGES = ("base", "sft", "grpo")


def stage_row(results: Path) -> dict[str, Any]:
    """Return the figures of one evaluation: accuracy (avg@n), its interval, and the counts behind it."""
    graded = read_graded(results)
    accuracy = intervals(graded, [1])[1]
    return {
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "problems": len(graded.problems),
        "episodes": sum(map(len, graded.problems.values())),
        "errors": graded.errors,
    }


def stage_table(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of each stage, from `folder`/eval_STAGE. Raises UserError if an evaluation is missing."""
    missing = [stage for stage in STAGES if not (folder / f"eval_{stage}" / "results.json").is_file()]
    if missing:
        raise UserError(f"{folder}/eval_{missing[0]}/results.json does not exist; evaluate that stage first")
    return {stage: stage_row(folder / f"eval_{stage}") for stage in STAGES}


def improves(table: dict[str, dict[str, Any]]) -> bool:
    """Return whether each stage's interval lies above that of the stage before."""
    rows = list(table.values())
    return all(later["low"] > earlier["high"] for earlier, later in zip(rows, rows[1:], strict=False))


def lines(table: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table as text."""
    text = [f"{'stage':<6} {'accuracy':>8}  {'95 % interval':<16} {'problems':>8} {'episodes':>8} {'errors':>6}"]
    for stage, row in table.items():
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        counts = f"{row['problems']:>8} {row['episodes']:>8} {row['errors']:>6}"
        text.append(f"{stage:<6} {row['accuracy']:>8.3f}  {interval:<16} {counts}")
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the run's output folder, with eval_base, eval_sft and eval_grpo")
    folder = parser.parse_args(argv).folder
    table = stage_table(folder)
    replace_file(folder / "table.json", [to_json(table, indent=2), b"\n"])
    print("\n".join(lines(table)))
    verdict = "each stage improves" if improves(table) else "the intervals of two stages overlap"
    print(f"{verdict} -> {folder / 'table.json'}")


if __name__ == "__main__":
    sys.exit(run(main))
