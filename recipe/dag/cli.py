"""`verl-dag`: commands for workflow files.

Invariant: a user's mistake ends in plain lines on stderr and a non-zero exit code, never in a traceback. Commands are
thin functions that import what they need when they run, so that `validate` and `plan` start without torch.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from recipe.dag.errors import UserError
from recipe.dag.workflow.problem import Problem

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
    play: Annotated[
        bool, typer.Option("--play", help="Also play a few episodes without a model, which run all of that code.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="With --play: the data file whose first row is played.")] = None,
) -> None:
    """Check workflow files: one line per mistake (file:line:col: where: what), exit code 2 if there is any. Python
    files that a workflow names are parsed, imported only with --load, and run only with --play."""
    from recipe.dag.inspection import load_checked, short_form_hint

    failed = False
    for file in files:
        try:
            workflow = load_checked(file)
            if load:
                from recipe.dag.episode.load import load_user_code

                load_user_code(workflow)
            if play:
                from recipe.dag.episode.rehearsal import SAMPLE, rehearse
                from recipe.dag.inspection import first_sample

                try:
                    rehearse(workflow, first_sample(data) if data else SAMPLE)
                except UserError as error:
                    hint = "" if data else " (the problem and its ground truth are made up; pass --data FILE for yours)"
                    raise UserError(f"{error}{hint}") from error
        except UserError as error:
            failed = True
            typer.echo(str(error), err=True)
        else:
            _warn(workflow.warnings)
            counts = [_count(len(workflow.agents), "agent"), _count(len(workflow.policies), "policy", "policies")]
            typer.echo(f"{file}: OK ({', '.join([*counts, _count(len(workflow.rollout_nodes), 'rollout node')])})")
            if (hint := short_form_hint(file)) is not None:
                typer.echo(f"{file}: {hint}", err=True)
    if failed:
        raise typer.Exit(2)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, named like the task.")],
) -> None:
    """Write a small task that trains on a laptop without changes: workflow, agents, reward, data, run script, tests."""
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
    """Write the JSON schema of workflow files, for completion and checks in editors. The first line of a workflow
    names it: `# yaml-language-server: $schema=workflow.schema.json`."""
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


@app.command()
def plan(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workflow file.", show_default=False)],
    output_format: Annotated[PlanFormat, typer.Option("--format", help="Output format.")] = PlanFormat.text,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="The same as --format mermaid.")] = False,
    overrides: _Overrides = None,
    gpu_gb: Annotated[
        float | None,
        typer.Option(
            "--gpu-gb",
            "--gpu_gb",
            min=1,
            help="Memory of each GPU, GB (10^9 bytes). (default: this machine's)",
        ),
    ] = None,
    config_path: _ConfigPath = None,
    config_name: _ConfigName = "dag",
) -> None:
    """Show what a workflow will do: agents, policies, order, training chain, token budget, and whether the run fits
    the memory of each GPU, for a configuration (--config-name, key=value ...)."""
    from recipe.dag.inspection import estimate_gpus, load_checked
    from recipe.dag.workflow import render
    from recipe.dag.workflow.memory import estimate
    from recipe.dag.workflow.plan import make_plan
    from recipe.dag.workflow_edits import split_edits

    renderers = {"text": render.to_text, "mermaid": render.to_mermaid, "json": render.to_json}
    settings, edits = split_edits(overrides or [])
    workflow = load_checked(file, edits)
    _warn(workflow.warnings)
    gpus = estimate_gpus(workflow, config_name, settings, config_path, gpu_gb)
    planned = make_plan(workflow).model_copy(update={"memory": estimate(workflow), **gpus})
    typer.echo(renderers["mermaid" if mermaid else output_format](planned))


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workflow file in any form.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new file. (default: stdout)")] = None,
) -> None:
    """Rewrite a workflow, sub-workflows and siiRL's files included, in the short form. Comments are dropped; new ones
    mark keys without effect."""
    from recipe.dag.workflow_import import import_workflow

    if output is not None and output.exists():
        raise UserError(f"{output}: already exists; delete it or pass another path")
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
    """List the algorithms: source, use, assumptions, and options with their defaults."""
    from recipe.dag.algorithms.catalogue import table

    typer.echo(table())


@app.command()
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


@app.command("pass-at-k")
def pass_at_k(
    results: Annotated[list[Path], typer.Argument(help="One or two evaluations: output folders or results.json.")],
    k: Annotated[str, typer.Option("--k", help="Comma-separated; by default 1, 2, 4 ... n.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print pass@k with 95 % bootstrap intervals; for two evaluations also their paired difference."""
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


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of training runs.")],
    tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Generated tokens of training to compare at. (default: as many as all runs have)"),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")] = Path("compare.json"),
) -> None:
    """Compare runs when their training had generated equally many tokens: accuracy, code pass rate, calls, tokens."""
    from recipe.dag.report.compare import compare as compare_runs
    from recipe.dag.report.compare import lines_of

    comparison = compare_runs(runs, tokens)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(comparison, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from error
    typer.echo("\n".join([*lines_of(comparison), f"{output}: written"]))


@app.command()
def train(
    overrides: _Overrides = None,
    config_path: _ConfigPath = None,
    config_name: _ConfigName = "dag",
) -> None:
    """Train a workflow, as python -m recipe.dag.main does. Resumes if the output folder holds a checkpoint."""
    from recipe.dag.main import launch

    launch(config_name, overrides or [], config_path)


@app.command()
def sft(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Parquet with `messages`, `tools`.", show_default=False)],
    model: Annotated[str, typer.Option(help="The model to train: a folder or a hub name.")],
    output: Annotated[Path, typer.Option(help="Folder for checkpoints, model, metrics and curve.")],
    overrides: _Overrides = None,
    val: Annotated[str | None, typer.Option(help="Transcripts for the validation loss.")] = None,
    config_path: _ConfigPath = None,
    config_name: _ConfigName = "sft",
) -> None:
    """Fine-tune a model on transcripts before reinforcement learning: loss on the assistant's tokens alone. Resumes if
    the output folder holds a checkpoint."""
    from recipe.dag.evaluate import option
    from recipe.dag.sft import launch

    options = {"data.train_files": data, "data.val_files": val, "model.path": model, "output_dir": output}
    settings = [option(key, value) for key, value in options.items() if value is not None]
    launch([*settings, *(overrides or [])], name=config_name, folder=config_path)


@app.command("eval")
def evaluate(
    file: Annotated[str, typer.Argument(metavar="WORKFLOW", help="A workflow file.", show_default=False)],
    overrides: _Overrides = None,
    model: Annotated[str | None, typer.Option(help="Value of MODEL_PATH: a folder or a hub name.")] = None,
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
        Path | None, typer.Option(help="Folder for results.json and summary.json. (default: outputs/eval_<workflow>)")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="A server with OpenAI's interface that plays every policy.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="With --base-url: the server's name of the model.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option("--key-env", help="With --base-url: the environment variable that holds the key.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="With --base-url: send token ids of this tokenizer, not messages.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option("--max-concurrent", min=1, help="With --base-url: requests at once. (default: 64)")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option("--request-timeout", min=0.001, help="With --base-url: seconds for each request.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Episodes per problem. (default: 1)")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Evaluate only the first problems.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling. (default: 0)")] = None,
    config_path: _ConfigPath = None,
    config_name: _ConfigName = "dag",
) -> None:
    """Evaluate a workflow without training: every policy frozen, results.json and summary.json."""
    from recipe.dag.evaluate import api_of, check_model_option, option
    from recipe.dag.main import launch
    from recipe.dag.workflow_edits import load_edited, split_edits

    if model is not None and checkpoint is not None:
        raise UserError("--model and --checkpoint exclude each other; pass only one")
    api = None
    if base_url is not None:
        if model is not None or checkpoint is not None:
            raise UserError("--base-url replaces every policy's model; remove --model and --checkpoint")
        if served_model is None:
            raise UserError("--base-url needs --served-model NAME, the name by which the server knows the model")
        api = api_of(
            base_url,
            served_model,
            key_env=key_env,
            tokenizer=tokenizer,
            max_concurrent=max_concurrent,
            timeout_s=request_timeout,
        )
    else:
        alone = {"--served-model": served_model, "--key-env": key_env, "--tokenizer": tokenizer}
        alone |= {"--max-concurrent": max_concurrent, "--request-timeout": request_timeout}
        if given := [name for name, value in alone.items() if value is not None]:
            raise UserError(f"{given[0]} has no effect without --base-url; add --base-url URL or remove it")
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
    settings = [option(key, value) for key, value in options.items() if value is not None]
    name = f"eval_{Path(file).stem}"
    launch(
        config_name,
        [option("workflow", file), option("trainer.experiment_name", name), *settings, *(overrides or [])],
        config_path,
        evaluate_only=True,
        weights=checkpoint,
        api=api,
    )


@app.command("serve")
def serve_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model: a folder or a hub name.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; the server asks for no key.")] = "127.0.0.1",
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="The name that requests use. (default: MODEL)")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option("--max-len", min=2, help="Tokens of prompt and response. (default: at most 8192)")
    ] = None,
    max_requests: Annotated[int, typer.Option("--max-requests", min=1, help="Generations at once; others wait.")] = 64,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
) -> None:
    """Serve a model on the CPU behind OpenAI's interface until SIGTERM or Ctrl-C: /v1/chat/completions,
    /v1/completions, /v1/models and /health. The first line on stdout is the base URL."""
    from recipe.dag.platform.openai_server import open_server, serve

    server = open_server(model, name=model_name, max_len=max_len, max_requests=max_requests, trust=trust_remote_code)
    serve(server, host, port, announce=lambda url: print(url, flush=True))


@app.command()
def doctor(
    workflow: Annotated[
        str | None, typer.Argument(metavar="[WORKFLOW]", help="Estimate the memory of each GPU.", show_default=False)
    ] = None,
    overrides: _Overrides = None,
    sandbox_url: Annotated[str | None, typer.Option(help="Run a program on this sandbox server.")] = None,
    sandbox_token: Annotated[
        str | None, typer.Option(envvar="SANDBOX_TOKEN", help="Its token; an argument is visible to all users here.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="List the models of this OpenAI-compatible server.")] = None,
    key_env: Annotated[str, typer.Option(help="Environment variable with its key.")] = "OPENAI_API_KEY",
    model: Annotated[
        str | None, typer.Option(help="Check its chat template, and parse a tool call that the template writes.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="With --model: histogram of its prompts' lengths, as WORKFLOW renders them."),
    ] = None,
    max_prompt_length: Annotated[int, typer.Option(min=1, help="With --data: the limit, in tokens.")] = 2048,
    gpu_gb: Annotated[float | None, typer.Option(min=1, help="With WORKFLOW: memory of each GPU, GB.")] = None,
    config_path: _ConfigPath = None,
    config_name: _ConfigName = "dag",
) -> None:
    """Check this machine: one line per check, exit code 1 if a run needs something that is missing. With any option,
    or a workflow, only what they name is checked."""
    from recipe.dag.doctor import examine
    from recipe.dag.doctor_options import option_checks

    checks = option_checks(
        workflow=workflow,
        sandbox_url=sandbox_url,
        sandbox_token=sandbox_token,
        base_url=base_url,
        key_env=key_env,
        model=model,
        data=data,
        max_prompt_length=max_prompt_length,
        gpu_gb=gpu_gb,
        overrides=overrides or [],
        config_path=config_path,
        config_name=config_name,
    )
    if not examine(typer.echo, checks or None):
        raise typer.Exit(1)


sandbox = typer.Typer(help="The sandbox that runs the agents' programs, as a separate server.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")


class Isolation(StrEnum):
    auto = "auto"
    full = "full"
    landlock = "landlock"
    rlimits = "rlimits"


@sandbox.command()
def serve(
    host: Annotated[str, typer.Option(help="Address; one other than loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8080,
    socket: Annotated[Path | None, typer.Option(help="A UNIX socket to listen on instead of a port.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File whose first line is the token to require; without it a new one is printed."),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Answer every process of this machine.")] = False,
    isolation: Annotated[Isolation, typer.Option(help="Isolation of programs from this machine.")] = Isolation.auto,
    allow_unsandboxed: Annotated[
        bool, typer.Option("--allow-unsandboxed", help="With --isolation=rlimits: programs run as this user.")
    ] = False,
    i_accept_unsandboxed: Annotated[bool, typer.Option("--i-accept-unsandboxed", hidden=True)] = False,
    max_concurrent: Annotated[int, typer.Option(help="Programs at once; 0: four per core, at least 8.")] = 0,
    max_queue: Annotated[int, typer.Option(help="Programs that may wait.")] = 1024,
    memory_mb: Annotated[int, typer.Option(help="Memory limit of a program if its request has none.")] = 1024,
    max_memory_mb: Annotated[int, typer.Option(help="Highest memory limit that a request may have.")] = 8192,
    max_sessions: Annotated[int, typer.Option(help="Sessions at once.")] = 1024,
    sessions_mb: Annotated[int, typer.Option(help="Size of all sessions' files together.")] = 8192,
    grace_s: Annotated[float, typer.Option(help="Seconds that running programs have to end after SIGTERM.")] = 5.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings only, not every request.")] = False,
) -> None:
    """Serve SandboxFusion's API until SIGTERM or Ctrl-C. The log goes to stderr, one JSON object per line."""
    from recipe.dag.sandbox import command

    command.serve(
        token_file,
        no_token,
        host=host,
        port=port,
        socket=str(socket) if socket is not None else None,
        isolation=str(isolation),
        accept_unsandboxed=allow_unsandboxed or i_accept_unsandboxed,
        max_concurrent=max_concurrent,
        max_queue=max_queue,
        memory_mb=memory_mb,
        max_memory_mb=max_memory_mb,
        max_sessions=max_sessions,
        sessions_mb=sessions_mb,
        grace_s=grace_s,
        log_level="warning" if quiet else "info",
    )


def _warn(warnings: Iterable[Problem]) -> None:
    for problem in warnings:
        typer.echo(problem.as_warning(), err=True)


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def main() -> None:
    """Run the console script, or `python -m recipe.dag.cli`."""
    try:
        app()
    except UserError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
