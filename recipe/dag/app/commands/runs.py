"""Commands that start a run: train, fine-tune, evaluate.

Invariant: options become settings of the configuration, in front of the overrides that a user typed, which win.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from recipe.dag.app.commands.options import ConfigName, ConfigPath, Settings
from recipe.dag.core.errors import UserError


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKFLOW] key=value ...",
            help="A workflow file, settings of the run, and workflow.<key>=VALUE.",
            show_default=False,
        ),
    ] = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = "dag",
) -> None:
    """Train a workflow, as python -m recipe.dag.main does. Resumes if the output folder holds a checkpoint."""
    from recipe.dag.app.launch import launch

    launch(config_name, with_workflow(arguments or []), config_path)


def with_workflow(arguments: list[str]) -> list[str]:
    """Return the arguments with `workflow=FILE` in place of a workflow file before the settings. Raises UserError."""
    first = arguments[0] if arguments else "="
    if "=" in first and not Path(first).is_file() or first.startswith(("+", "~")):
        return arguments
    if duplicates := [word for word in arguments[1:] if word.lstrip("+").startswith("workflow=")]:
        raise UserError(f"{duplicates[0]}: {first} names the workflow, too; pass only one")
    from recipe.dag.app.evaluate import option

    return [option("workflow", first), *arguments[1:]]


def run(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE[/SCRIPT]]", help="Without a script: list them.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="The script's; options after --.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The recipe's run on a laptop, run_tiny_cpu.sh.")] = False,
) -> None:
    """Run a script of a recipe in the current folder, which gets its outputs; or list the scripts."""
    from recipe.dag.app.recipes import TINY, listing, start

    name, _, script = (recipe or "").partition("/")
    if tiny and (script or not name):
        raise UserError(f"--tiny takes the name of a recipe, not {recipe!r}" if name else "--tiny needs a recipe")
    if tiny or script:
        start(name, script or TINY, arguments or [])
    typer.echo("\n".join(listing(name or None)))


def sft(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Parquet with `messages`, `tools`.", show_default=False)],
    model: Annotated[str, typer.Option(help="The model to train: a folder or a hub name.")],
    output: Annotated[Path, typer.Option(help="Folder for checkpoints, model, metrics and curve.")],
    overrides: Settings = None,
    val: Annotated[str | None, typer.Option(help="Transcripts for the validation loss.")] = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = "sft",
) -> None:
    """Fine-tune a model on transcripts before reinforcement learning: loss on the assistant's tokens alone. Resumes if
    the output folder holds a checkpoint."""
    from recipe.dag.app.evaluate import option
    from recipe.dag.train.sft.launch import launch

    options = {"data.train_files": data, "data.val_files": val, "model.path": model, "output_dir": output}
    settings = [option(key, value) for key, value in options.items() if value is not None]
    launch([*settings, *(overrides or [])], name=config_name, folder=config_path)


def evaluate(
    file: Annotated[str, typer.Argument(metavar="WORKFLOW", help="A workflow file.", show_default=False)],
    overrides: Settings = None,
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
        Path | None, typer.Option(help="Folder for results.json and summary.json. (default: outputs/eval_NAME)")
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
    config_path: ConfigPath = None,
    config_name: ConfigName = "dag",
) -> Path:
    """Evaluate a workflow without training: every policy frozen, results.json and summary.json."""
    from recipe.dag.app.evaluate import api_of, check_model_option, option
    from recipe.dag.app.launch import Evaluation, launch
    from recipe.dag.loading.edits import load_edited, split_edits

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
        if ignored := [name for name, value in alone.items() if value is not None]:
            raise UserError(f"{ignored[0]} has no effect without --base-url; add --base-url URL or remove it")
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
    path = Path(file).absolute()
    name = f"eval_{path.parent.name if path.stem == 'workflow' else path.stem}"  # a task's file is FOLDER/workflow.yaml
    return launch(
        config_name,
        [option("workflow", file), option("trainer.experiment_name", name), *settings, *(overrides or [])],
        config_path,
        Evaluation(checkpoint, api),
    )


def study(
    file: Annotated[Path, typer.Argument(help="A study file: arms, seeds, tokens.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of runs and report. (default: outputs/FILE's name)")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    only_report: Annotated[bool, typer.Option("--only-report", help="Run nothing: report the finished runs.")] = False,
) -> None:
    """Train the arms of a study, several seeds each, at equal sampled tokens, and compare them: table.md, table.tex,
    figure.png, manifest.json. The same command goes on after an interruption; finished runs are not repeated."""
    from rich.console import Console

    from recipe.dag.app.study import run_study
    from recipe.dag.report.study import table

    output = output or Path("outputs") / file.stem
    figures = run_study(file, output, jobs=jobs, only_report=only_report)
    Console().print(table(figures))
    typer.echo(f"{output}: table.md, table.tex, figure.png, manifest.json")


def merge(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="A folder of PEFT, such as global_step_N/POLICY/actor.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the model and its tokenizer.")],
    base: Annotated[str | None, typer.Option(help="A folder or hub name. (default: the one the adapter names)")] = None,
) -> None:
    """Add an adapter to the model that it was trained on, and write the sum as a model of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipe.dag.platform.adapter_weights import merge as add
    from recipe.dag.train.models import load_model
    from recipe.dag.workflow.adapter_shape import CONFIG, read_shape

    read_shape(adapter)
    named = base or json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not named:
        raise UserError(f"{adapter}: {CONFIG} does not name the adapter's base; pass --base MODEL")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} already exists; choose another --output")
    path, _ = load_model(named, "--base" if base else str(adapter))
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    add(model, adapter)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(path).save_pretrained(output)
    typer.echo(f"{output}: {named} with {adapter}")
