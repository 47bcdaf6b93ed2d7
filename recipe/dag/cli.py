"""`verl-dag`: commands around a workflow file.

Invariant: a user's mistake ends in plain lines on stderr and a non-zero exit code, never in a traceback. A command is a
thin function here; what it needs is imported inside it, so that `validate` and `plan` start without torch.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from recipe.dag.errors import UserError

app = typer.Typer(
    name="verl-dag",
    help="Multi-agent reinforcement learning of language models, declared in one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class PlanFormat(StrEnum):
    text = "text"
    mermaid = "mermaid"
    json = "json"


@app.callback()
def _root() -> None:
    """Keeps commands as commands while there is only one."""


@app.command()
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Workflow files.", show_default=False)],
) -> None:
    """Check workflow files: one line per mistake (file:line:col: where: what), exit code 1 if there is any."""
    from recipe.dag.workflow.loader import load_workflow

    failed = False
    for file in files:
        try:
            workflow = load_workflow(file)
        except UserError as error:
            failed = True
            typer.echo(str(error), err=True)
        else:
            counts = [_count(len(workflow.agents), "agent"), _count(len(workflow.policies), "policy", "policies")]
            typer.echo(f"{file}: OK ({', '.join([*counts, _count(len(workflow.rollout_nodes), 'rollout node')])})")
    if failed:
        raise typer.Exit(1)


@app.command()
def plan(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workflow file.", show_default=False)],
    format: Annotated[PlanFormat, typer.Option("--format", help="How to show it.")] = PlanFormat.text,
) -> None:
    """Show what a workflow will do: agents, policies, order, training chain, token budget."""
    from recipe.dag.workflow import render
    from recipe.dag.workflow.loader import load_workflow
    from recipe.dag.workflow.plan import make_plan

    renderers = {"text": render.to_text, "mermaid": render.to_mermaid, "json": render.to_json}
    typer.echo(renderers[format](make_plan(load_workflow(file))))


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def main() -> None:
    """The entry point of the console script and of `python -m recipe.dag.cli`."""
    try:
        app()
    except UserError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
