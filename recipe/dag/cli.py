"""`verl-dag`: commands around a workflow file.

Invariant: a user's mistake ends in plain lines on stderr and a non-zero exit code, never in a traceback. A command is a
thin function here; what it needs is imported inside it, so that `validate` and `plan` start without torch.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recipe.dag.errors import UserError
from recipe.dag.workflow.problem import Problem

if TYPE_CHECKING:
    from recipe.dag.workflow.edits import Edit
    from recipe.dag.workflow.schema import Workflow

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


def _print_version(wanted: bool) -> None:
    if wanted:
        from recipe.dag.doctor import pinned_verl

        typer.echo(f"verl-dag {own_version()} (verl {pinned_verl()})")
        raise typer.Exit


def own_version() -> str:
    """Of the installed package, or of the checkout that this is."""
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


_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value ...", help="Settings of the run, and workflow.<key>=VALUE.", show_default=False),
]
_ConfigPath = Annotated[Path | None, typer.Option("--config-path", help="Folder of the configuration.")]
_ConfigName = Annotated[str, typer.Option("--config-name", help="A file in that folder, without .yaml.")]


@app.command()
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Workflow files.", show_default=False)],
    load: Annotated[
        bool,
        typer.Option(
            "--load", help="Also import the hooks, envs, tools, rewards and estimators, as a run does at its start."
        ),
    ] = False,
) -> None:
    """Check workflow files: one line per mistake (file:line:col: where: what), exit code 2 if there is any. The Python
    files that they name are read, but not run without --load."""
    failed = False
    for file in files:
        try:
            workflow = _load(file)
            if load:
                from recipe.dag.episode.load import load_user_code

                load_user_code(workflow)
        except UserError as error:
            failed = True
            typer.echo(str(error), err=True)
        else:
            _warn(workflow.warnings)
            counts = [_count(len(workflow.agents), "agent"), _count(len(workflow.policies), "policy", "policies")]
            typer.echo(f"{file}: OK ({', '.join([*counts, _count(len(workflow.rollout_nodes), 'rollout node')])})")
            if (hint := _shorter(file)) is not None:
                typer.echo(f"{file}: {hint}", err=True)
    if failed:
        raise typer.Exit(2)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder; its name is the task's.")],
) -> None:
    """Write a small task that trains on a laptop as it is: workflow, agents, reward, data, run script, tests."""
    from recipe.dag.new import new_task

    for file in new_task(folder):
        typer.echo(str(file))
    typer.echo(f"train it: bash {folder}/run_tiny_cpu.sh")


@app.command()
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write. (default: print it)")
    ] = None,
) -> None:
    """Write the JSON schema of workflow files, with which editors complete and check them. A workflow names it in its
    first line: `# yaml-language-server: $schema=workflow.schema.json`."""
    from recipe.dag.workflow.json_schema import workflow_schema

    text = json.dumps(workflow_schema(), indent=1, ensure_ascii=False) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{output}: cannot be written: {error.strerror}") from error
        typer.echo(f"{output}: name it in a workflow's first line, `# yaml-language-server: $schema={output.name}`")


def _shorter(file: str) -> str | None:
    from recipe.dag.workflow.short_form import shorter
    from recipe.dag.workflow.siirl.translate import is_foreign
    from recipe.dag.workflow.source import read_source

    source = read_source(file)
    return None if is_foreign(source) else shorter(source)


@app.command()
def plan(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workflow file.", show_default=False)],
    format: Annotated[PlanFormat, typer.Option("--format", help="How to show it.")] = PlanFormat.text,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="The same as --format mermaid.")] = False,
    overrides: _Overrides = None,
    gpu_gb: Annotated[
        float | None,
        typer.Option(
            "--gpu-gb", "--gpu_gb", min=1, help="Memory of each GPU, 10^9 bytes. (default: of this machine's)"
        ),
    ] = None,
    config_path: _ConfigPath = None,
    config_name: _ConfigName = "dag",
) -> None:
    """Show what a workflow will do: agents, policies, order, training chain, token budget, and the memory of each GPU
    with a verdict, under the run's configuration (--config-name, key=value ...)."""
    from recipe.dag.workflow import render
    from recipe.dag.workflow.edits import split_edits
    from recipe.dag.workflow.memory import estimate
    from recipe.dag.workflow.plan import make_plan

    renderers = {"text": render.to_text, "mermaid": render.to_mermaid, "json": render.to_json}
    rest, edits = split_edits(overrides or [])
    workflow = _load(file, edits)
    _warn(workflow.warnings)
    gpus = _plan_gpus(workflow, config_name, rest, config_path, gpu_gb)
    planned = make_plan(workflow).model_copy(update={"memory": estimate(workflow), **gpus})
    typer.echo(renderers["mermaid" if mermaid else format](planned))


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workflow file of any form.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new file. (default: stdout)")] = None,
) -> None:
    """Rewrite a workflow in the short form, siiRL's files and sub-workflows included. Its comments are not kept; new
    ones say what nothing reads."""
    from recipe.dag.workflow.importer import import_workflow

    if output is not None and output.exists():
        raise UserError(f"{output}: is there already; remove it, or choose another name")
    text = import_workflow(file, output)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from error
    typer.echo(f"{output}: written")


@app.command()
def algorithms() -> None:
    """List the algorithms: source, use, assumptions, and the options with their defaults."""
    from recipe.dag.algorithms.catalogue import table

    typer.echo(table())


@app.command()
def train(
    overrides: _Overrides = None,
    config_path: _ConfigPath = None,
    config_name: _ConfigName = "dag",
) -> None:
    """Train a workflow: the same as python -m recipe.dag.main. Resumes if its output folder holds a checkpoint."""
    from recipe.dag.main import launch

    launch(config_name, overrides or [], config_path)


@app.command("eval")
def evaluate(
    file: Annotated[str, typer.Argument(metavar="WORKFLOW", help="A workflow file.", show_default=False)],
    overrides: _Overrides = None,
    model: Annotated[str | None, typer.Option(help="What MODEL_PATH stands for: a folder or a hub name.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Trained weights: outputs/NAME/checkpoints, or one global_step_N in it.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Problems: parquet in verl's schema, JSON, JSON Lines, or a hub data set.")
    ] = None,
    input_key: Annotated[
        str | None, typer.Option("--input-key", "--input_key", help="Column of the problem. (default: found by name)")
    ] = None,
    label_key: Annotated[
        str | None, typer.Option("--label-key", "--label_key", help="Column of the answer. (default: found by name)")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where results.json and summary.json go. (default: outputs/eval_<workflow>)")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Episodes per problem. (default: 1)")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="The first problems only.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the sampling. (default: 0)")] = None,
    config_path: _ConfigPath = None,
    config_name: _ConfigName = "dag",
) -> None:
    """Evaluate a workflow without training: every policy frozen, results.json and summary.json."""
    from recipe.dag.evaluate import check_model_option, option
    from recipe.dag.main import launch
    from recipe.dag.workflow.edits import load_edited, split_edits

    if model is not None and checkpoint is not None:
        raise UserError("--model and --checkpoint exclude each other; drop one of them")
    if model is not None:
        check_model_option(load_edited(file, split_edits(overrides or [])[1]))
    options = {
        "model_path": model,
        "data.val_files": data,
        "data.input_key": input_key,
        "data.label_key": label_key,
        "output_dir": output,
        "validation.n": n,
        "validation.max_samples": max_samples,
        "seed": seed,
    }
    given = [option(key, value) for key, value in options.items() if value is not None]
    name = f"eval_{Path(file).stem}"
    launch(
        config_name,
        [option("workflow", file), option("trainer.experiment_name", name), *given, *(overrides or [])],
        config_path,
        evaluate_only=True,
        weights=checkpoint,
    )


@app.command()
def doctor() -> None:
    """Check this machine: one line per check, exit code 1 if something that a run needs is missing."""
    from recipe.dag.doctor import examine

    if not examine(typer.echo):
        raise typer.Exit(1)


sandbox = typer.Typer(help="The sandbox that runs the agents' programs, on its own.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")


class Isolation(StrEnum):
    full = "full"
    rlimits = "rlimits"


class EngineName(StrEnum):
    auto = "auto"
    warm = "warm"
    bwrap = "bwrap"
    rlimits = "rlimits"


@sandbox.command()
def serve(
    host: Annotated[str, typer.Option(help="Address; any but loopback needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8080,
    socket: Annotated[Path | None, typer.Option(help="A UNIX socket to listen on instead.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Its first line is the token to ask for.")] = None,
    isolation: Annotated[Isolation, typer.Option(help="What must stand between programs and this machine.")] = "full",
    accept_unsandboxed: Annotated[
        bool, typer.Option("--i-accept-unsandboxed", help="With --isolation=rlimits: programs run as this user.")
    ] = False,
    engine: Annotated[EngineName, typer.Option(help="What runs the programs.")] = "auto",
    max_concurrent: Annotated[int, typer.Option(help="Programs at once; 0: four per core, at least 8.")] = 0,
    max_queue: Annotated[int, typer.Option(help="Programs that may wait.")] = 1024,
    memory_mb: Annotated[int, typer.Option(help="Of a program whose request names no limit.")] = 1024,
    max_memory_mb: Annotated[int, typer.Option(help="The most that a request may name.")] = 8192,
    max_sessions: Annotated[int, typer.Option(help="Sessions at once.")] = 1024,
    sessions_mb: Annotated[int, typer.Option(help="All sessions' files together.")] = 8192,
    grace_s: Annotated[float, typer.Option(help="Seconds that running programs get to end after SIGTERM.")] = 5.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings only, not every request.")] = False,
) -> None:
    """Serve SandboxFusion's API until SIGTERM or Ctrl-C. The log goes to stderr, one JSON object per line."""
    from recipe.dag.sandbox import command

    command.serve(
        token_file,
        host=host,
        port=port,
        socket=str(socket) if socket is not None else None,
        isolation=str(isolation),
        accept_unsandboxed=accept_unsandboxed,
        engine=str(engine),
        max_concurrent=max_concurrent,
        max_queue=max_queue,
        memory_mb=memory_mb,
        max_memory_mb=max_memory_mb,
        max_sessions=max_sessions,
        sessions_mb=sessions_mb,
        grace_s=grace_s,
        log_level="warning" if quiet else "info",
    )


def _load(file: str, edits: Sequence[Edit] = ()) -> Workflow:
    """The workflow, its overrides of verl's configuration checked, too. Raises UserError."""
    from recipe.dag.main import check_overrides
    from recipe.dag.settings.compose import has_verl
    from recipe.dag.workflow.edits import load_edited

    workflow = load_edited(file, edits)
    if has_verl():  # whose configuration says which keys there are
        check_overrides(file, text=workflow.edited)
    return workflow


def _plan_gpus(
    workflow: Workflow, name: str, overrides: list[str], folder: Path | None, gpu_gb: float | None
) -> dict[str, Any]:
    """Estimate the memory of each GPU of a run with this configuration; `gpu_gb` in place of this machine's GPUs."""
    from recipe.dag.settings.compose import compose_config, has_verl
    from recipe.dag.settings.defaults import apply, decide, describe
    from recipe.dag.workflow.gpu_memory import GB
    from recipe.dag.workflow.machine import Machine, this_machine

    if not has_verl() and not overrides and gpu_gb is None:
        return {
            "no_gpus": "Memory of each GPU: not estimated, since verl, whose configuration a run has, is not installed"
        }
    config = compose_config(name, [f"workflow={json.dumps(workflow.path)}", *overrides], folder)
    if config.platform == "cpu":
        return {"no_gpus": "Memory of each GPU: none is used (platform=cpu)"}
    if config.model_path:
        os.environ["MODEL_PATH"] = str(config.model_path)
    machine = this_machine()
    if gpu_gb is not None:
        machine = Machine((int(gpu_gb * GB),) * max(len(machine.gpu_bytes), 1), machine.host_bytes)
    decision = decide(config, workflow, machine, visible=len(machine.gpu_bytes) or 1)
    if decision.unknown:
        hint = "; pass --gpu_gb 80" if gpu_gb is None and not machine.gpu_bytes else ""
        return {"no_gpus": f"Memory of each GPU: not estimated, {decision.unknown}{hint}"}
    apply(config, decision)
    trains = bool(workflow.trained_policies())
    return {"gpus": decision.memory, "choices": tuple(describe(decision, machine, config, trains=trains))}


def _warn(warnings: Iterable[Problem]) -> None:
    for problem in warnings:
        typer.echo(problem.as_warning(), err=True)


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
