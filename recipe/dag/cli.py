"""`verl-dag`: the console script.

Invariant: a user's mistake ends in plain lines on stderr and a non-zero exit code, never in a traceback. Commands are
thin functions that import what they need when they run, so that `validate` and `plan` start without torch.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from recipe.dag.commands import machine, records, runs, workflow_files
from recipe.dag.errors import UserError

app = typer.Typer(
    name="verl-dag",
    help="Multi-agent reinforcement learning of language models, declared in one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from recipe.dag.doctor import pinned_verl

        typer.echo(f"verl-dag {own_version()} (verl {pinned_verl()})")
        raise typer.Exit


def own_version() -> str:
    """Return the version of this checkout, or of the installed package."""
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if file.is_file():
        return tomllib.loads(file.read_text())["project"]["version"]
    return metadata.version("verl-dag")


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print this version and verl's."),
    ] = False,
) -> None: ...


# in the order in which the help lists them
app.command()(workflow_files.validate)
app.command()(workflow_files.new)
app.command()(workflow_files.schema)
app.command()(workflow_files.plan)
app.command("import")(workflow_files.import_)
app.command()(workflow_files.algorithms)
app.command()(records.trace)
app.command("pass-at-k")(records.pass_at_k)
app.command()(records.compare)
app.command()(runs.train)
app.command()(runs.sft)
app.command("eval")(runs.evaluate)
app.command("serve")(machine.serve_model)
app.command()(machine.doctor)

sandbox = typer.Typer(help="The sandbox that runs the agents' programs, as a separate server.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")
sandbox.command("serve")(machine.serve_sandbox)


def main() -> None:
    """Run the console script, or `python -m recipe.dag.cli`."""
    try:
        app()
    except UserError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
