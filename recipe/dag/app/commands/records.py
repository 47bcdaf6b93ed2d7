"""Commands that read what runs wrote.

Invariant: an output folder is only read; a file is written only where an option names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from recipe.dag.core.errors import UserError


def trace(
    folder: Annotated[Path, typer.Argument(help="The output folder of a run.")],
    step: Annotated[int | None, typer.Option(help="The step; the last one recorded by default.")] = None,
    validation: Annotated[bool | None, typer.Option("--validation/--training", help="One split alone.")] = None,
    solved: Annotated[bool | None, typer.Option("--solved/--unsolved", help="Only such episodes.")] = None,
    episode: Annotated[int, typer.Option(min=0, help="Which of the episodes that match, from 0.")] = 0,
    full: Annotated[bool, typer.Option(help="Print long texts whole.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file instead.")] = None,
) -> None:
    """Print one recorded episode: the problem, and each call with its text, tools, reward and advantage."""
    from rich.console import Console

    from recipe.dag.report.trace import MAX_CHARS, choose, read_records, show, write_svg

    split = None if validation is None else "validation" if validation else "train"
    record = choose(read_records(folder), step=step, split=split, solved=solved, position=episode)
    max_chars = None if full else MAX_CHARS
    if svg is not None:
        write_svg(record, svg, max_chars=max_chars)
    else:
        show(record, Console(), max_chars=max_chars)


def pass_at_k(
    results: Annotated[list[Path], typer.Argument(help="One or two evaluations: output folders or results.json.")],
    k: Annotated[str, typer.Option("--k", help="Comma-separated; by default 1, 2, 4 ... n.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print pass@k with 95 % intervals; for two evaluations also their paired difference."""
    from recipe.dag.report import pass_table

    if len(results) > 2:
        raise UserError("pass-at-k compares at most two evaluations")
    try:
        ks = [int(number) for number in k.split(",") if number.strip()]
    except ValueError:
        raise UserError(f"--k {k}: pass whole numbers with commas, such as 1,8,32") from None
    if any(number < 1 for number in ks):
        raise UserError(f"--k {k}: each must be at least 1")
    figures = pass_table.table(results, ks)
    typer.echo(json.dumps(figures, indent=2) if as_json else "\n".join(pass_table.lines(figures)))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of training runs.")],
    tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Generated tokens of training to compare at. (default: as many as all runs have)"),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures to this JSON file.")] = None,
) -> None:
    """Compare runs when their training had generated equally many tokens: accuracy, code pass rate, calls, tokens."""
    from recipe.dag.report.compare import compare as compare_runs
    from recipe.dag.report.compare import lines_of

    comparison = compare_runs(runs, tokens)
    typer.echo("\n".join(lines_of(comparison)))
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(comparison, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from error
    typer.echo(f"{output}: written")
