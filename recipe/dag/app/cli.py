"""`verl-dag`: the console script.

Invariant: a user's mistake ends in plain lines on stderr and a non-zero exit code, never in a traceback. Commands are
thin functions that import what they need when they run, so that `validate` and `plan` start without torch.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from recipe.dag.app.commands import audit, machine, records, runs, what_if, workflow_files
from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import ROOT

app = typer.Typer(
    name="verl-dag",
    help="Multi-agent reinforcement learning of language models, declared in one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from recipe.dag.app.doctor import pinned_verl

        typer.echo(f"verl-dag {own_version()} (verl {pinned_verl()})")
        raise typer.Exit


def own_version() -> str:
    """Return the version of this checkout, or of the installed package."""
    file = ROOT / "pyproject.toml"
    if file.is_file():
        return tomllib.loads(file.read_text())["project"]["version"]
    return metadata.version("verl-dag")


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print this version and verl's.")
    ] = False,
) -> None: ...


def _panel(title: str, **commands: Callable[..., Any]) -> None:
    for name, command in commands.items():
        app.command(name.rstrip("_").replace("_", "-"), rich_help_panel=title)(command)


# in the order in which the help lists them
_panel(
    "Write and check a workflow",
    new=workflow_files.new,
    validate=workflow_files.validate,
    audit=audit.audit,
    plan=workflow_files.plan,
    schema=workflow_files.schema,
    algorithms=workflow_files.algorithms,
    import_=workflow_files.import_,
)
_panel(
    "Train and evaluate",
    run=runs.run,
    train=runs.train,
    sft=runs.sft,
    eval=runs.evaluate,
    study=runs.study,
    merge=runs.merge,
)
_panel(
    "Read results",
    trace=records.trace,
    watch=records.watch,
    replay=what_if.replay,
    blame=what_if.blame,
    compare=records.compare,
    pass_at_k=records.pass_at_k,
)
_panel("This machine", doctor=machine.doctor, serve=machine.serve_model)

sandbox = typer.Typer(help="The sandbox that runs the agents' programs, as a separate server.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox", rich_help_panel="This machine")
# The sandbox reads its options itself.
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}
sandbox.command("serve", add_help_option=False, context_settings=_PASS_ON)(machine.serve_sandbox)


def _warn_of_another_checkout() -> None:
    """Checkouts that share an environment have the code of the last one that was installed."""
    here = Path.cwd() / "recipe" / "dag"
    if (here / "cli.py").is_file() and not here.samefile(ROOT / "recipe" / "dag"):
        typer.echo(f"warning: this runs {ROOT}, not the checkout here; to install that: pip install -e .", err=True)


def main() -> None:
    """Run the console script, or `python -m recipe.dag.cli`."""
    _warn_of_another_checkout()
    try:
        app()
    except UserError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
