"""Launches a training run or an evaluation: its stages from the command line to the last step, in their order.

Invariant: every run ends here, on a laptop and on a GPU host. A mistake of the user is a UserError before a file is
written, and before Ray starts unless the sandbox, which starts beside it, finds it. When a run fails, its processes are
killed before Ray is shut down.
"""

from __future__ import annotations

import asyncio
import errno
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from recipe.dag.app.evaluate import (
    check_conversations,
    check_output,
    describe_evaluation,
    evaluation_of,
    find_checkpoint,
)
from recipe.dag.app.preflight import check_run
from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.interrupt import Interrupted, Interruption
from recipe.dag.core.output_lock import locked
from recipe.dag.episode.listed_tools import with_listed_tools
from recipe.dag.episode.load import load_user_code
from recipe.dag.platform.environment import choose_platform, prepare_environment, start_ahead
from recipe.dag.policy.cluster import Cluster
from recipe.dag.policy.shards import shortfall
from recipe.dag.policy.shared_folders import check_folders
from recipe.dag.report.phases import PHASES, announce, end_phase
from recipe.dag.report.run_record import write_run_record
from recipe.dag.settings import defaults
from recipe.dag.settings.decision_lines import describe, describe_memory
from recipe.dag.settings.pools import plan_pools
from recipe.dag.settings.typed import Typed
from recipe.dag.settings.verl_run import NO_EFFECT
from recipe.dag.tools.sandbox import raise_limit
from recipe.dag.train.evaluation import evaluate
from recipe.dag.train.inputs import Inputs, evaluation_inputs, training_inputs
from recipe.dag.train.models import find_models
from recipe.dag.train.resources import Resources
from recipe.dag.train.resume import launch_facts, spent_before
from recipe.dag.train.rollout import episodes_at_once
from recipe.dag.train.user_metrics import UserMetrics
from recipe.dag.types.model import Api
from recipe.dag.workflow import machine
from recipe.dag.workflow.plan import max_forks
from recipe.dag.workflow.schema import Workflow

Result = TypeVar("Result")

FILES_PER_EPISODE = 2
"""Such as one connection each for its env and its reward."""
OTHER_FILES = 512
"""Files of Ray, data, logs and the sandbox's connections."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The models of an evaluation; by default the workflow's own."""

    weights: Path | None = None
    """A checkpoint of the trained policies."""
    api: Api | None = None
    """A server's model that plays all policies."""


@dataclass(slots=True)
class Run:
    """A run on its way through the stages."""

    config: DictConfig
    workflow: Workflow
    stop: Interruption
    evaluation: Evaluation | None
    """None: the run trains."""
    platform: str = "none"
    """none: all policies are APIs."""

    @property
    def trains(self) -> bool:
        return self.evaluation is None

    @property
    def folders(self) -> list[str]:
        """Return the folders that the run writes to."""
        return [self.config.output_dir, *([self.config.trainer.default_local_dir] if self.trains else [])]


def launch(name: str, overrides: list[str], folder: Path | None = None, evaluation: Evaluation | None = None) -> Path:
    """Train, or evaluate if there is an `evaluation`, with the configuration `name` of `folder`; return the output
    folder.

    Raises UserError before anything is started, and SystemExit with the shell's code after a signal ended the run.
    """
    with Interruption() as stop, signals_reported(stop):
        if evaluation is not None:
            stop.way_back = "the same command goes on where it was"
        run = check(name, overrides, folder, evaluation, stop)
        with locked(run.folders), _full_disk_reported(run):
            with_cluster(run, partial(execute, run))
    return Path(run.config.output_dir)


def with_cluster(run: Run, work: Callable[[Cluster | None], Coroutine[Any, Any, Result]]) -> Result:
    """Return what `work` returns, which gets the cluster of the run's policies; None if all of them are APIs."""
    if not run.workflow.local_policies():
        load_user_code(run.workflow)
        return asyncio.run(run.stop.run(work(None)))
    prepare(run)
    trainer = run.config.trainer
    pools = plan_pools(run.workflow, nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)
    # Ray must outlive the event loop, whose threads may still wait for it
    with Cluster(run.config, pools, platform=run.platform) as cluster:
        return asyncio.run(run.stop.run(work(cluster)))


def check(
    name: str, overrides: list[str], folder: Path | None, evaluation: Evaluation | None, stop: Interruption
) -> Run:
    """Compose the configuration, load the workflow and check both; nothing is imported or started yet."""
    evaluates, by_api = evaluation is not None, evaluation is not None and evaluation.api is not None
    checked = check_run(name, overrides, folder, evaluate_only=evaluates, all_by_api=by_api)
    config, workflow = checked.config, checked.workflow
    _print_warnings(checked.typed, workflow, evaluate_only=evaluates)
    if evaluation is None:
        _check_trainable(config, workflow)
        return Run(config, workflow, stop, None)
    check_output(config)
    weights = find_checkpoint(evaluation.weights) if evaluation.weights is not None else None
    workflow = evaluation_of(workflow, weights=weights, temperature=config.validation.temperature, api=evaluation.api)
    check_conversations(config, workflow)
    return Run(config, workflow, stop, Evaluation(weights, evaluation.api))


def prepare(run: Run) -> None:
    """Choose the platform and what the configuration leaves open, and import the user's code."""
    announce("importing torch and Ray")
    if run.config.platform != "cpu":
        start_ahead()
    run.platform = choose_platform(run.config)
    prepare_environment(run.platform)
    load_user_code(run.workflow)  # only now: it may import verl, which reads that environment
    UserMetrics(run.config, run.workflow.path)
    saves = run.trains and run.config.trainer.save_freq > 0
    if saves and (warning := shortfall(run.config, run.workflow)):
        print(f"warning: {warning}", file=sys.stderr)
    for line in choose_defaults(run.config, run.workflow, run.platform):
        print(line, file=sys.stderr)
    if warning := shortage_of_files(episodes_at_once(run.config), raise_limit()):
        print(f"warning: {warning}", file=sys.stderr)


def shortage_of_files(in_flight: int, limit: int) -> str | None:
    """Return a warning if `limit` open files may be too few for `in_flight` episodes; None if they are enough."""
    needed = OTHER_FILES + FILES_PER_EPISODE * in_flight
    if limit >= needed:
        return None
    fitting = max(1, (limit - OTHER_FILES) // FILES_PER_EPISODE)
    return (
        f"this process may open {limit} files, and rollout.max_in_flight={in_flight} episodes may need {needed}: "
        f"raise the hard limit (ulimit -Hn {needed}, or nofile in /etc/security/limits.conf), or set "
        f"rollout.max_in_flight={fitting}"
    )


async def execute(run: Run, cluster: Cluster | None) -> None:
    """Read the inputs, start the resources, and train or evaluate. `cluster`: None if all policies are APIs."""
    inputs = await read(run)
    if inputs is None:
        return
    async with started(run, inputs, cluster) as resources:
        await (_train if run.trains else _evaluate)(run, inputs, resources)


@asynccontextmanager
async def started(
    run: Run, inputs: Inputs, cluster: Cluster | None, *, record: bool = True
) -> AsyncIterator[Resources]:
    """Start the resources, and end them. record: write what identifies the launch before the policies start."""
    run.workflow = await with_listed_tools(run.workflow)
    if cluster is not None:
        announce("loading verl")
        cluster.join()
        run.stop.install()  # ray.init replaced its handler
    spent = spent_before(run.config, inputs.start, evaluate_only=not run.trains)
    resources = await Resources.open(run.config, run.workflow, [*inputs.train, *inputs.val], spent=spent)
    try:
        if cluster is not None:
            written = Path(run.config.trainer.default_local_dir) if run.trains else None
            check_folders(written, inputs.models.folders(), cluster.nodes())
            await asyncio.to_thread(resources.check_agents, run.workflow, inputs.models)
            # Ray's processes, the sandbox and what is imported start beside each other
            asyncio.get_running_loop().run_in_executor(None, _import_policies, run.trains)
            cluster.start()
            run.stop.install()
        await resources.ready()
        if record:
            write_record(run, inputs)
        if cluster is not None:
            cluster.logs.open()
            await start(run, inputs, resources)
        yield resources
    except BaseException as error:
        lost = ""
        if cluster is not None and isinstance(error, Exception) and run.stop.signum is None:
            lost = await asyncio.to_thread(cluster.lost, error)
        # killed workers end the threads that wait for them, before Ray is shut down under those threads
        for policy in resources.policies.values():
            policy.kill()
        if cluster is not None and isinstance(error, Exception):
            await _point_to_logs(UserError(f"{lost}; {run.stop.way_back}") if lost else error, cluster)
        raise
    finally:
        await resources.close()


async def _point_to_logs(error: Exception, cluster: Cluster) -> None:
    """Add to an error where the output of the run's processes is. Raises UserError, with the place in its line."""
    pointer = await asyncio.to_thread(cluster.pointer)
    if isinstance(error, UserError):
        raise UserError(f"{error} ({pointer})" if pointer else str(error)) from error
    if pointer:
        error.add_note(pointer)


async def read(run: Run) -> Inputs | None:
    """Read models, problems and checkpoint; None if there is nothing left to train."""
    announce("reading the models and the problems")
    if run.evaluation is None:
        return await training_inputs(run.config, run.workflow, run.platform, run.stop)
    return await evaluation_inputs(run.config, run.workflow, run.platform, run.evaluation.weights)


def write_record(run: Run, inputs: Inputs) -> None:
    """Write what identifies this launch: the first files of the run."""
    evaluated = run.evaluation.weights if run.evaluation is not None else None
    write_run_record(
        run.config.output_dir,
        config=cast(dict[str, Any], OmegaConf.to_container(run.config, resolve=True)),  # the keys of a DictConfig
        workflow=run.workflow,
        fingerprint=inputs.fingerprint.items,
        launch=launch_facts(run.config, platform=run.platform, start=inputs.start, evaluated=evaluated),
        subset=inputs.subset,
    )


def _import_policies(trains: bool) -> None:
    """Import what starting the policies needs. Who needs it next meets an error again, and reports it."""
    for name in ("local_policies", "trainer") if trains else ("local_policies",):
        with suppress(Exception):
            import_module(f"recipe.dag.train.{name}")


async def start(run: Run, inputs: Inputs, resources: Resources) -> None:
    """Start the policies, and the processes that run episodes."""
    await resources.start_policies(run.config, run.workflow, inputs.models, platform=run.platform)
    # the most episodes that the run plays at once
    episodes = len(inputs.val) * run.config.validation.n
    if run.trains:
        training = run.config.data.train_batch_size * run.config.actor_rollout_ref.rollout.n
        episodes = max(episodes, training * (1 + max_forks(run.workflow)))
    await resources.start_processes(run.config, run.workflow, episodes=episodes)


async def _train(run: Run, inputs: Inputs, resources: Resources) -> None:
    from recipe.dag.train.trainer import Trainer  # imports verl

    await Trainer(run.config, run.workflow, resources, inputs, run.stop).train()


async def _evaluate(run: Run, inputs: Inputs, resources: Resources) -> None:
    PHASES.ready()
    started = time.monotonic()
    max_programs = resources.sandbox.arguments["max_concurrent"] if resources.sandbox is not None else None
    about = describe_evaluation(run.config, run.workflow, max_programs=max_programs)
    runner = resources.runner(run.config, run.workflow)
    summary = await evaluate(run.config, runner, run.workflow, inputs, about)
    counts = f"{counted(summary['num_samples'], 'episode')}, {counted(summary['num_errors'], 'error')}"
    seconds = time.monotonic() - started
    accuracy = "nothing graded"
    if summary["num_graded"]:
        accuracy = f"accuracy {summary['final_accuracy']:.4f}"
        if summary["num_graded"] < summary["num_samples"]:
            accuracy += f" of {summary['num_graded']} graded"
        if summary["num_errors"]:
            accuracy += f" ({summary['final_accuracy_all']:.4f} with errors as not solved)"
    if summary["num_errors"]:
        counts += f" (most often: {summary['most_frequent_error']})"
    pass_at = summary.get("pass@k", {})
    pass_rates = "".join(f", pass@{k} {pass_at[k]:.4f}" for k in dict.fromkeys([*pass_at][:1] + [*pass_at][-1:]))
    print(f"{accuracy}, {counts}{pass_rates}, {seconds:.0f} s: {run.config.output_dir}/summary.json")


def choose_defaults(config: DictConfig, workflow: Workflow, platform: str) -> Iterator[str]:
    """Fill in the settings that `config` leaves open, and yield lines that report them.

    Raises UserError if the run does not fit on the visible GPUs.
    """
    import torch

    if platform == "cpu":
        defaults.apply(config, defaults.on_cpu(config))
        return
    find_models(workflow)  # downloads config.json from the hub to the cache, where the estimate reads it
    this_machine = machine.this_machine()
    decision = defaults.decide(config, workflow, this_machine, visible=torch.cuda.device_count())
    defaults.apply(config, decision)
    defaults.check_servers(config, workflow)
    yield from describe(decision, this_machine, config, workflow)
    yield from describe_memory(decision, this_machine)


def _print_warnings(typed: Mapping[str, Typed], workflow: Workflow, *, evaluate_only: bool) -> None:
    for key in typed.keys() & NO_EFFECT.keys():
        print(f"warning: {typed[key].argument} has no effect: {NO_EFFECT[key]}", file=sys.stderr)
    for warning in workflow.warnings:
        if not (evaluate_only and warning.training_only):
            print(warning.as_warning(), file=sys.stderr)


def _check_trainable(config: DictConfig, workflow: Workflow) -> None:
    if not workflow.trained_policies():
        raise UserError(f"{config.workflow}: every policy is frozen, so there is nothing to train; use verl-dag eval")
    if not config.data.train_files:
        raise UserError("data.train_files: training needs problems; pass data.train_files=FILE")


@contextmanager
def signals_reported(stop: Interruption) -> Iterator[None]:
    """Print how to continue a run that a signal ended, and exit with the shell's code."""
    try:
        try:
            yield
        finally:
            end_phase()
    except Interrupted as interrupted:
        _end_interrupted(stop, interrupted)
    except UserError:
        raise
    except Exception as error:
        if stop.signum is None:
            raise
        # the run's processes got the signal, too (Slurm sends it to all), and their end caused this error
        cause = f": {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        _end_interrupted(stop, Interrupted(stop.signum), cause)
    if stop.summary:
        assert stop.signum is not None  # only a stopped run has a summary
        print(stop.summary, file=sys.stderr)
        raise SystemExit(128 + stop.signum)


def _end_interrupted(stop: Interruption, signalled: Interrupted, cause: str = "") -> NoReturn:
    print(f"interrupted ({signalled}{cause}); {stop.way_back}", file=sys.stderr)
    raise SystemExit(signalled.exit_code) from None


@contextmanager
def _full_disk_reported(run: Run) -> Iterator[None]:
    """Turn the error of a full disk into one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        file = error.filename or run.config.output_dir
        raise UserError(f"{file}: cannot be written: {error.strerror}; make room; {run.stop.way_back}") from error
