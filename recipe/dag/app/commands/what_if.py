"""Commands that play episodes of a finished run again.

Invariant: the run's folder is only read; a file is written only where an option names it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from recipe.dag.app.commands.options import open_console
from recipe.dag.core.errors import UserError


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run.")],
    episode: Annotated[
        list[str] | None,
        typer.Option(help="STEP/UID/INDEX; several are possible. (default: a problem of the validation, at 3 steps)"),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="NODE[.TURN[.ROUND]]", help="Where to fork. (default: each call, or the agent's first)"),
    ] = None,
    silence: Annotated[
        str | None, typer.Option(metavar="AGENT", help="Its calls from there on are silent. (default: that call alone)")
    ] = None,
    say: Annotated[str | None, typer.Option(metavar="TEXT", help="The call says this.")] = None,
    swap: Annotated[
        str | None, typer.Option(metavar="AGENT=POLICY[@STEP]", help="Another policy, or one of another step, answers.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Change nothing: sample the call and what follows.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Other weights than the record's: a global_step_N of the run.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Continuations.")] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a page (.html), or the effects (.json).")
    ] = None,
) -> None:
    """Play recorded episodes again with one change, and compare the outcomes: what if an agent had been silent?"""
    from recipe.dag.app.what_if import ask, questions_of
    from recipe.dag.report.journal import run_name
    from recipe.dag.report.run_folder import read_run
    from recipe.dag.report.what_if import lines_of, write_effects

    change = _change(silence, say, swap, again=again)
    if change.kind == "say" and at is None:
        raise UserError("--say needs --at NODE, the call that says it")
    if output is not None and output.suffix not in (".html", ".json"):
        raise UserError(f"{output}: write a page, FILE.html, or the effects, FILE.json")
    run = read_run(folder)
    questions = questions_of(folder, run.records, episode or [], at, checkpoint, change.agent)
    effects = ask(folder, questions, change, n)
    typer.echo("\n".join(lines_of(effects)))
    if output is None:
        return
    if output.suffix == ".json":
        write_effects(effects, run_name(folder / "episodes.jsonl"), output)
        typer.echo(f"{output}: written")
    else:
        from recipe.dag.report.viewer.page import write_page

        uids = {question.recorded.episode.uid for question in questions}
        shown = replace(run, records=[one for one in run.records if one["uid"] in uids])
        typer.echo(write_page([shown], output, effects))


def _change(silence: str | None, say: str | None, swap: str | None, *, again: bool):
    from recipe.dag.episode.replay import Change

    given = {"--silence": silence, "--say": say, "--swap": swap, "--again": again or None}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} exclude each other; pass only one")
    if swap is not None:
        agent, _, policy = swap.partition("=")
        if not agent or not policy:
            raise UserError(f"--swap {swap}: write AGENT=POLICY, or AGENT=POLICY@STEP")
        return Change("swap", agent, policy)
    if say is not None:
        return Change("say", text=say)
    return Change() if again else Change("silence", silence or "")


def blame(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run.")],
    data: Annotated[str, typer.Option(help="Problems, as for verl-dag eval.")],
    n: Annotated[int, typer.Option("-n", min=1, help="Episodes per problem.")] = 2,
    checkpoint: Annotated[Path | None, typer.Option(help="A global_step_N of the run. (default: its last one)")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Only the first problems.")] = None,
    reward: Annotated[bool, typer.Option("--reward", help="Compare the mean reward, not the outcome.")] = False,
) -> None:
    """Play problems with each agent silent, as at the run's start, or with another episode's words: who matters?"""
    from recipe.dag.app.blame import blame as blame_agents
    from recipe.dag.app.blame import most_needed, table_of
    from recipe.dag.report.what_if import reward_value, value_of

    value = reward_value if reward else value_of
    mean, found = blame_agents(folder, data, n, checkpoint_folder=checkpoint, max_samples=max_samples, value=value)
    console = open_console()
    what = "mean reward" if reward else "mean outcome"
    console.print(f"{what} without a change: {'not graded' if mean is None else f'{mean:.3f}'}; differences:")
    console.print(table_of(found))
    agent = most_needed(found)
    known = "no interval leaves 0 out: more problems or a larger -n would narrow them"
    typer.echo(known if agent is None else f"the agent on which most depends: {agent}")
