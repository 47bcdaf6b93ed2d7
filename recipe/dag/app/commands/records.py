"""Commands that read what runs wrote.

Invariant: an output folder is only read; a file is written only where an option names it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from recipe.dag.app.commands.options import open_console
from recipe.dag.core.errors import UserError, writing


def trace(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Output folder of a run; on a page, up to four.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write all that match as a page, trace.html, instead.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step; the last one recorded, a page has all.")] = None,
    validation: Annotated[bool | None, typer.Option("--validation/--training", help="One split alone.")] = None,
    solved: Annotated[bool | None, typer.Option("--solved/--unsolved", help="Only such episodes.")] = None,
    flagged: Annotated[bool, typer.Option("--flagged", help="Only those that a monitor flagged.")] = False,
    uid: Annotated[str | None, typer.Option(help="Only the episodes of this sample, in all steps.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only episodes with this agent, and only its calls.")] = None,
    worst: Annotated[
        bool, typer.Option(help="Those with the least reward first, of the agent if one is given.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print a line for each episode that matches.")] = False,
    episode: Annotated[int, typer.Option(min=0, help="Which of the episodes that match, from 0.")] = 0,
    full: Annotated[
        bool, typer.Option(help="Print whole texts, prompts, the truth, parts of rewards, stop reasons, cached tokens.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file instead.")] = None,
    what_if: Annotated[
        Path | None, typer.Option("--what-if", help="With --output: the effects that verl-dag replay wrote.")
    ] = None,
) -> None:
    """Show recorded episodes: one in the terminal, a list, or all as a page for a browser, which compares runs."""
    from rich.console import Console

    from recipe.dag.report import trace as traces
    from recipe.dag.report.episodes import Wanted, choose, list_episodes, read_records, select

    split = None if validation is None else "validation" if validation else "train"
    wanted = Wanted(step, split, solved, uid, agent, worst, flagged)
    if output is not None:
        from recipe.dag.report.run_folder import read_run
        from recipe.dag.report.viewer.page import write_page
        from recipe.dag.report.what_if import read_effects

        compared = [read_run(folder) for folder in _at_most_four(runs)]
        shown = [replace(run, records=select(run.records, wanted, last_step=False)) for run in compared]
        typer.echo(write_page(shown, output, [] if what_if is None else read_effects(what_if)))
        return
    if what_if is not None or len(runs) > 1:
        given = f"--what-if {what_if}: is" if what_if is not None else "several runs are"
        raise UserError(f"{given} for a page; add --output FILE.html")
    records = read_records(runs[0])
    if list_:
        open_console().print(list_episodes(select(records, wanted), agent))
        return
    record = choose(records, wanted, episode)
    if svg is not None:
        traces.write_svg(record, svg, agent=agent, full=full)
    else:
        traces.show(record, Console(), agent=agent, full=full)


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of up to four runs.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 0,
) -> None:
    """Serve the page of runs to a browser on this machine while they go on, until SIGTERM or Ctrl-C. A folder may be
    empty or missing until its run writes. The first line on stdout is the address, with a random part that other users
    of the machine do not know."""
    from secrets import token_urlsafe

    from recipe.dag.app.watch import application
    from recipe.dag.platform.openai_http import serve

    token = token_urlsafe(16)
    app = application(_at_most_four(runs), token)
    serve(app, "127.0.0.1", port, announce=lambda url: print(f"{url}/{token}/", flush=True))


def _at_most_four(runs: list[Path]) -> list[Path]:
    if len(runs) > 4:
        raise UserError(f"{len(runs)} runs: a page compares at most four")
    return runs


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
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(comparison, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"{output}: written")
