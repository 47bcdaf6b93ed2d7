"""Commands about a workflow file: check, draw, convert, create.

Invariant: nothing is trained or generated, so they need no GPU and, without --load and --play, no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipe.dag.app.commands.options import ConfigName, ConfigPath, Settings
from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError, writing
from recipe.dag.core.problem import Problem

if TYPE_CHECKING:
    from recipe.dag.workflow.schema import Workflow


class PlanFormat(StrEnum):
    text = "text"
    mermaid = "mermaid"
    json = "json"


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Workflow files.", show_default=False)],
    load: Annotated[
        bool,
        typer.Option(
            "--load", help="Also import the hooks, envs, tools, rewards and estimators, as a run does at its start."
        ),
    ] = False,
    play: Annotated[
        bool, typer.Option("--play", help="Also play a few episodes without a model, which run all of that code.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="With --play: the data file whose first row is played.")] = None,
    show: Annotated[bool, typer.Option("--show", help="With --play: print the episodes.")] = False,
) -> None:
    """Check workflow files: one line per mistake (file:line:col: where: what), exit code 2 if there is any. Python
    files that a workflow names are parsed, imported only with --load, and run only with --play."""
    from recipe.dag.app.inspection import short_form_hint
    from recipe.dag.app.preflight import check_workflow

    for option, is_given in (("--data", data is not None), ("--show", show)):
        if is_given and not play:
            raise UserError(f"{option} has no effect without --play; add --play or remove it")
    failed = False
    for file in files:
        try:
            workflow = check_workflow(file)
            if load:
                from recipe.dag.episode.load import load_user_code

                load_user_code(workflow)
            if play:
                _play_episodes(workflow, data, show=show)
        except UserError as error:
            failed = True
            typer.echo(str(error), err=True)
        else:
            _warn(workflow.warnings)
            counts = [counted(len(workflow.agents), "agent"), counted(len(workflow.policies), "policy", "policies")]
            typer.echo(f"{file}: OK ({', '.join([*counts, counted(len(workflow.rollout_nodes), 'rollout node')])})")
            if (hint := short_form_hint(file)) is not None:
                typer.echo(f"{file}: {hint}", err=True)
    if failed:
        raise typer.Exit(2)


def _play_episodes(workflow: Workflow, data: str | None, *, show: bool) -> None:
    """Play the first row of `data`, warn of keys that nothing writes and of rewards that pay for anything, and print
    the episodes if `show`. Raises UserError."""
    from rich.console import Console

    from recipe.dag.app.inspection import first_samples
    from recipe.dag.episode.rehearsal import SAMPLE, paid_alike, rehearse, unseen_keys
    from recipe.dag.report.journal import record_of
    from recipe.dag.report.jsonfile import to_json
    from recipe.dag.report.trace import show as show_episode

    try:
        episodes = rehearse(workflow, first_samples(data, 1)[0] if data else SAMPLE)
    except UserError as error:
        hint = "" if data else " (the problem and its ground truth are made up; pass --data FILE for yours)"
        raise UserError(f"{error}{hint}") from error
    for line in (*unseen_keys(workflow, episodes), *paid_alike(episodes)):
        typer.echo(f"{workflow.path}: warning: {line}", err=True)
    for episode in episodes if show else ():
        show_episode(json.loads(to_json(record_of(episode))), Console())


def new(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, named like the task.")]) -> None:
    """Write a small task that trains on a laptop without changes: workflow, agents, reward, data, run script, tests."""
    from recipe.dag.app.new import new_task

    for file in new_task(folder):
        typer.echo(str(file))
    typer.echo(f"train it: bash {folder}/run_tiny_cpu.sh")


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write. (default: print it)")
    ] = None,
) -> None:
    """Write the JSON schema of workflow files, for completion and checks in editors. The first line of a workflow
    names it: `# yaml-language-server: $schema=workflow.schema.json`."""
    from recipe.dag.workflow.json_schema import workflow_schema

    text = json.dumps(workflow_schema(), indent=1, ensure_ascii=False) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        with writing(output):
            output.write_text(text, encoding="utf-8")
        typer.echo(f"{output}: name it in a workflow's first line, `# yaml-language-server: $schema={output.name}`")


def plan(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workflow file.", show_default=False)],
    output_format: Annotated[PlanFormat, typer.Option("--format", help="Output format.")] = PlanFormat.text,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="The same as --format mermaid.")] = False,
    overrides: Settings = None,
    gpu_gb: Annotated[
        float | None,
        typer.Option(
            "--gpu-gb", "--gpu_gb", min=1, help="Memory of each GPU, GB (10^9 bytes). (default: this machine's)"
        ),
    ] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Show instead what a prefix cache saves of each node's prompts.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="With --reuse: problems to play, in place of made-up ones.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Propose which policies share GPUs, by the metrics of this run; with --reuse, what it measured.",
        ),
    ] = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = "dag",
) -> None:
    """Show what a workflow will do: agents, policies, order, training chain, token budget, and whether the run fits
    the memory of each GPU, for a configuration (--config-name, key=value ...)."""
    from recipe.dag.app.inspection import estimate_memory, open_planned, predict_reuse, propose_sharing
    from recipe.dag.workflow import render
    from recipe.dag.workflow.plan import make_plan

    renderers = {"text": render.to_text, "mermaid": render.to_mermaid, "json": render.to_json}
    workflow, config = open_planned(file, overrides or [], config_name, config_path, gpu_gb)
    _warn(workflow.warnings)
    if reuse:
        typer.echo("\n".join(predict_reuse(workflow, config, data, run)))
        return
    planned = make_plan(workflow).model_copy(update=estimate_memory(workflow, config, gpu_gb))
    if run is not None:
        planned = planned.model_copy(update={"sharing": propose_sharing(workflow, config, run)})
    typer.echo(renderers["mermaid" if mermaid else output_format](planned))


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workflow file in any form.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new file. (default: stdout)")] = None,
) -> None:
    """Rewrite a workflow, sub-workflows and siiRL's files included, in the short form. Comments are dropped; new ones
    mark keys without effect."""
    from recipe.dag.loading.conversion import import_workflow

    if output is not None and output.exists():
        raise UserError(f"{output}: already exists; delete it or pass another path")
    text = import_workflow(file, output)
    if output is None:
        typer.echo(text, nl=False)
        return
    with writing(output):
        output.write_text(text, encoding="utf-8")
    typer.echo(f"{output}: written")


def algorithms() -> None:
    """List the algorithms: source, use, assumptions, and options with their defaults."""
    from recipe.dag.algorithms.catalogue import table

    typer.echo(table())


def _warn(warnings: Iterable[Problem]) -> None:
    for problem in warnings:
        typer.echo(problem.as_warning(), err=True)
