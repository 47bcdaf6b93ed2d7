"""The verbs of `import verl_dag`: what the commands do, as functions for scripts and notebooks.

Invariant: settings mean what they mean on the command line, and a mistake is the same UserError. A function works in a
notebook, too, whose event loop is running: the work then has a loop in a separate thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from recipe.dag.report.run_folder import Run
    from recipe.dag.types.record import Episode
    from recipe.dag.workflow.schema import Workflow

T = TypeVar("T")


def load(path: str | Path, /, **changes: Any) -> Workflow:
    """Load and check a workflow file. `changes`: values that replace the file's, as `workflow.<key>=VALUE` does, such
    as `algorithm={"estimator": "rloo"}`. Raises WorkflowError with every mistake of the file, UserError for those of
    the changes."""
    from recipe.dag.app.preflight import check_workflow
    from recipe.dag.loading.edits import split_edits

    return check_workflow(path, split_edits(_arguments({"workflow": changes}))[1])


def play(
    workflow: Workflow | str | Path,
    sample: Mapping[str, Any] | str,
    model: Callable[..., Any] | str,
    *,
    served_model: str | None = None,
    key_env: str | None = None,
    tokenizer: str | None = None,
    sandbox: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Episode:
    """Play one episode in which `model` answers for every policy, and return it with its rewards.

    sample: the text of a problem, or a mapping with `prompt` (text or messages) and, for the rewards, `ground_truth`,
    `data_source`, `extra_info`
    model: a function that gets the messages and returns a text, or the URL of a server with OpenAI's interface
    served_model, key_env, tokenizer: of a server, as in `verl-dag eval`
    sandbox: `isolation` and `accept_unsandboxed` of the local sandbox, which starts if something needs it

    Raises UserError for a mistake in the workflow or its code, and for a failure that ends the episode.
    """
    from recipe.dag.episode.play import play_episode
    from recipe.dag.train.data import prompt_of

    loaded = load(workflow) if isinstance(workflow, str | Path) else workflow
    row = {"prompt": sample} if isinstance(sample, str) else sample
    row = {"ground_truth": "", "data_source": "", "extra_info": {}, **row, "prompt": prompt_of(row)}
    server = {"model": served_model or "", "key_env": key_env, "tokenizer": tokenizer}
    coroutine = play_episode(loaded, row, model, server=server, sandbox=sandbox or {}, seed=seed)
    return _outside_loop(lambda: asyncio.run(coroutine))


def train(workflow: str | Path, /, *, config: str | Path = "dag", **settings: Any) -> Run:
    """Train a workflow, as `verl-dag train` does, and return what the run wrote. It resumes if the output folder holds
    a checkpoint.

    config: a configuration file, or the name of one of this package's
    settings: of the run, nested or by dotted key (`**{"trainer.total_training_steps": 3}`); the keys of `workflow`
    replace values of the file
    """
    from recipe.dag.app.evaluate import option
    from recipe.dag.app.launch import launch

    name, folder = _configuration(config)
    return read_run(_outside_loop(launch, name, [option("workflow", workflow), *_arguments(settings)], folder))


def evaluate(
    workflow: str | Path,
    /,
    data: str | Path,
    model: str | Path | None = None,
    *,
    checkpoint: str | Path | None = None,
    served_model: str | None = None,
    key_env: str | None = None,
    tokenizer: str | None = None,
    config: str | Path = "dag",
    **settings: Any,
) -> Run:
    """Evaluate a workflow, as `verl-dag eval` does, and return what that wrote; `summary` has the accuracies.

    data: the problems
    model: value of MODEL_PATH, or the URL of a server with OpenAI's interface, which then plays every policy
    checkpoint: trained weights in place of a model
    served_model, key_env, tokenizer: of a server
    config, settings: as in `train`
    """
    from recipe.dag.app.commands.runs import evaluate as evaluate_command

    is_url = model is not None and "://" in str(model)
    name, folder = _configuration(config)
    return read_run(
        _outside_loop(
            evaluate_command,
            str(workflow),
            _arguments(settings),
            data=str(data),
            model=None if is_url or model is None else str(model),
            base_url=str(model) if is_url else None,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            served_model=served_model,
            key_env=key_env,
            tokenizer=tokenizer,
            config_path=folder,
            config_name=name,
        )
    )


def read_run(folder: str | Path, /) -> Run:
    """Return what a run or an evaluation wrote into its output folder. Raises UserError if that is nothing."""
    from recipe.dag.report import run_folder

    return run_folder.read_run(Path(folder))


def _configuration(config: str | Path) -> tuple[str, Path | None]:
    """Return the name and the folder of a configuration file; a bare name is one of this package's."""
    path = Path(config)
    return (path.stem, path.parent) if path.suffix == ".yaml" else (str(config), None)


def _arguments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as the command line has them, with dotted keys."""
    from recipe.dag.app.evaluate import option
    from recipe.dag.core.flatten import flatten
    from recipe.dag.loading.edits import PREFIX

    arguments = []
    for key, value, _ in flatten(dict(settings)):
        if isinstance(value, str | Path) and not key.startswith(PREFIX):
            arguments.append(option(key, value))
        else:  # JSON is valid YAML, and hydra reads it, too
            arguments.append(f"{key}={json.dumps(value, ensure_ascii=False, default=str)}")
    return arguments


def _outside_loop(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function that starts an event loop, in a separate thread if one is running here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*args, **options)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **options).result()
