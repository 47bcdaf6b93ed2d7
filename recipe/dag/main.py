"""`python -m recipe.dag.main [--config-path FOLDER] [--config-name NAME] [--eval] key=value ...`: train or evaluate a
workflow.

Invariant: both run scripts end here, on a laptop and on a GPU host. What the user got wrong is one line on stderr and
exit code 2, before Ray starts and before a file is written.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from recipe.dag.episode.load import load_user_code
from recipe.dag.errors import UserError
from recipe.dag.evaluate import check_output, evaluation_of, find_checkpoint
from recipe.dag.interrupt import Interrupted, Interruption
from recipe.dag.open_files import raise_limit, shortage
from recipe.dag.report.phases import PHASES, announce, end_phase
from recipe.dag.report.run_record import write_run_record
from recipe.dag.run_paths import absolute, make_absolute
from recipe.dag.settings.compose import CONFIG_FOLDER, compose_config, typed_settings
from recipe.dag.settings.effects import check_effects
from recipe.dag.settings.verl_run import NO_EFFECT
from recipe.dag.train.samples import check_samples
from recipe.dag.workflow.edits import load_edited, split_edits
from recipe.dag.workflow.loader import load_overrides
from recipe.dag.workflow.problem import WorkflowError
from recipe.dag.workflow.schema import Workflow

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from recipe.dag.policy.cluster import Cluster
    from recipe.dag.policy.policy import PolicyRuntime

ROOT = Path(__file__).resolve().parents[2]


def check_overrides(file: str | Path, config: DictConfig | None = None, text: str | None = None) -> None:
    """Raises WorkflowError where a workflow overrides what verl's configuration does not have. `config`: the run's;
    verl's own with this project's defaults where absent. `text`: the file's, where the command line edits it."""
    from recipe.dag.policy.overrides import misfits

    overrides = load_overrides(file, text)
    if not overrides:
        return
    if config is None:
        config = compose_config("dag", ["workflow=any"])
    if found := list(misfits(config, overrides)):
        if text is not None:  # places in the edited text are none in the file
            found = [replace(problem, line=0, column=0) for problem in found]
        raise WorkflowError(found)


def choose_platform(config: DictConfig) -> str:
    """cuda or cpu. Raises UserError when cuda is asked for and absent."""
    import torch

    available = torch.cuda.is_available()
    if config.platform not in ("auto", "cuda", "cpu"):
        raise UserError(f"platform={config.platform} is unknown; choose auto, cuda or cpu")
    if config.platform == "cuda" and not available:
        raise UserError("platform=cuda, but torch sees no GPU; run on a CUDA host or with platform=cpu")
    return "cuda" if available and config.platform != "cpu" else "cpu"


def choose_defaults(config: DictConfig, workflow: Workflow, platform: str) -> Iterator[str]:
    """Decide what `config` leaves open, write it there, and yield what to print of it. Raises UserError where a run
    on GPUs cannot be placed on those that are visible."""
    import torch

    from recipe.dag.settings import defaults
    from recipe.dag.train.models import find_models
    from recipe.dag.workflow.machine import this_machine

    if platform == "cpu":
        defaults.apply(config, defaults.on_cpu(config))
        return
    find_models(workflow)  # a hub's config.json comes into the cache, where the estimate looks for it
    machine = this_machine()
    decision = defaults.decide(config, workflow, machine, visible=torch.cuda.device_count())
    defaults.apply(config, decision)
    defaults.check_servers(config, workflow)
    yield from defaults.describe(decision, machine, config, trains=bool(workflow.trained_policies()))
    yield from defaults.describe_memory(decision, machine)


def prepare_environment(platform: str) -> None:
    """What verl and every Ray process must find in their environment; before `import verl`."""
    # verl lists the engines that are not installed, one warning each
    warnings.filterwarnings("ignore", message=r"\w+ engine is not available")
    threads = os.cpu_count() or 1
    if platform == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    else:
        import torch

        threads = (threads - 2) // max(1, torch.cuda.device_count())
    # Ray gives a process one thread; optimizers in host memory (FSDP2's offloading) want what there is
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")  # verl's own default, but for its platforms
    modules = [m for m in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m]
    if "recipe.dag.platform.plugin" not in modules:
        os.environ["VERL_USE_EXTERNAL_MODULES"] = ",".join([*modules, "recipe.dag.platform.plugin"])
    paths = [str(ROOT), *[absolute(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")


async def run(
    config: DictConfig,
    workflow: Workflow,
    *,
    platform: str,
    evaluate_only: bool,
    stop: Interruption,
    cluster: Cluster,
    evaluated: Path | None = None,
) -> None:
    """`evaluated`: the checkpoint whose weights are evaluated, where they are of one."""
    announce("looking at the models and the problems")
    from omegaconf import OmegaConf

    from recipe.dag.policy.shards import check_loadable
    from recipe.dag.policy.shared_folders import check_folders
    from recipe.dag.reward.gold import check_gold
    from recipe.dag.train import checkpoint
    from recipe.dag.train.data import Columns, load_samples
    from recipe.dag.train.fingerprint import fingerprint_of
    from recipe.dag.train.models import find_models
    from recipe.dag.train.resume import find_start, launch_facts, report_evaluated, way_back

    models = await asyncio.to_thread(find_models, workflow)
    data = config.data
    columns = Columns(
        data.input_key,
        data.label_key,
        data.train_split,
        data.train_name,
        data.answer_format,
        data.add_prompt_suffix or "",
    )
    train = []
    if not evaluate_only:
        train = load_samples(data.train_files, max_samples=data.train_max_samples, columns=columns)
        await check_gold(workflow, train, "data.train_files")
    val = []
    if data.val_files:
        limit = config.validation.max_samples if config.validation.max_samples is not None else data.val_max_samples
        columns = replace(columns, split=data.val_split, name=data.val_name)
        val = load_samples(data.val_files, max_samples=limit, what="data.val_files", columns=columns)
        await check_gold(workflow, val, "data.val_files")
    elif evaluate_only:
        raise UserError("data.val_files: an evaluation needs problems; pass --data FILE, or data.val_files=FILE")
    if evaluate_only and platform == "cpu":  # the CPU server's cache has a row for each request
        rollout = config.actor_rollout_ref.rollout
        rollout.max_num_seqs = min(rollout.max_num_seqs, config.rollout.max_in_flight, len(val) * config.validation.n)
    fingerprint, start = await asyncio.to_thread(fingerprint_of, config, workflow, models, train, val), None
    if evaluated is not None:
        report_evaluated(evaluated, fingerprint)
    if not evaluate_only:
        start = find_start(config, workflow, fingerprint, samples=len(train), platform=platform)
        stop.way_back = way_back(config, start, 0 if start is None else start.step)
        total = int(config.trainer.total_training_steps)
        if start is not None and start.step >= total:
            print(
                f"the checkpoint is at step {start.step} of {total}: nothing to do; "
                "raise trainer.total_training_steps to go on"
            )
            return
        if start is not None:
            check_loadable(start.folder, checkpoint.read(start.folder), config, workflow)

    announce("loading verl")
    from recipe.dag.train import setup, trainer

    cluster.join()
    stop.install()  # ray.init has put its own handler there
    toolbox = await setup.Toolbox.open(config, workflow, [*train, *val])
    policies: dict[str, PolicyRuntime] = {}
    try:
        written = None if evaluate_only else Path(config.trainer.default_local_dir)
        check_folders(written, models.folders(), cluster.nodes())
        write_run_record(
            config.output_dir,
            config=OmegaConf.to_container(config, resolve=True),
            workflow=workflow,
            fingerprint=fingerprint.items,
            launch=launch_facts(config, platform=platform, start=start, evaluated=evaluated),
        )
        cluster.start()
        stop.install()
        await setup.start_policies(config, workflow, models, policies, platform=platform)
        batches = [len(val) * config.validation.n]
        if not evaluate_only:
            batches.append(config.data.train_batch_size * config.actor_rollout_ref.rollout.n)
        await toolbox.start_processes(config, policies, episodes=max(batches))
        if evaluate_only:
            PHASES.ready()
            started = time.monotonic()
            summary = await trainer.evaluate(config, workflow, policies, toolbox, val)
            counts = f"{summary['num_samples']} episodes, {summary['num_errors']} errors"
            seconds = time.monotonic() - started
            accuracy = f"accuracy {summary['final_accuracy']:.4f}"
            if summary["num_errors"]:
                accuracy += f" ({summary['final_accuracy_all']:.4f} with errors as not solved)"
                counts += f" (most often: {summary['most_frequent_error']})"
            print(f"{accuracy}, {counts}, {seconds:.0f} s: {config.output_dir}/summary.json")
        else:
            mixing = await asyncio.to_thread(setup.open_mixing, config, workflow, models, policies, platform=platform)
            loop = trainer.Trainer(
                config,
                workflow,
                policies,
                toolbox,
                train_samples=train,
                val_samples=val,
                mixing=mixing,
                start=start,
                fingerprint=fingerprint.items,
                stop=stop,
            )
            await loop.train()
    except BaseException as error:
        # a thread that waits for a worker ends with it; Ray must not be shut down under that thread
        for policy in policies.values():
            policy.kill()
        pointer = await asyncio.to_thread(cluster.pointer) if isinstance(error, Exception) else ""
        if pointer and isinstance(error, UserError):
            raise UserError(f"{error} ({pointer})") from error
        if pointer:
            error.add_note(pointer)
        raise
    finally:
        await toolbox.close()


def launch(
    name: str,
    overrides: list[str],
    folder: Path | None = None,
    *,
    evaluate_only: bool = False,
    weights: Path | None = None,
) -> None:
    """Compose, check and run; `weights`: a checkpoint to evaluate. Raises UserError before anything is started, and
    SystemExit with the shell's code after a signal has ended the run."""
    with Interruption() as stop:
        try:
            try:
                _launch(name, overrides, folder, stop, evaluate_only=evaluate_only, weights=weights)
            finally:
                end_phase()
        except Interrupted as interrupted:
            _end_interrupted(stop, interrupted, evaluate_only=evaluate_only)
        except UserError:
            raise
        except Exception as error:
            if stop.signum is None:
                raise
            # the run's processes had the signal, too (Slurm sends it to all), and ended under it
            cause = f": {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            _end_interrupted(stop, Interrupted(stop.signum), cause, evaluate_only=evaluate_only)
        if stop.summary:
            print(stop.summary, file=sys.stderr)
            raise SystemExit(128 + stop.signum)


def _end_interrupted(stop: Interruption, signalled: Interrupted, cause: str = "", *, evaluate_only: bool) -> NoReturn:
    """Say how a run that a signal ended goes on, and end it with the shell's code. `cause`: what ended under it."""
    left = "no results were written" if evaluate_only else stop.way_back
    print(f"interrupted ({signalled}{cause}); {left}", file=sys.stderr)
    raise SystemExit(signalled.exit_code) from None


def _launch(
    name: str,
    overrides: list[str],
    folder: Path | None,
    stop: Interruption,
    *,
    evaluate_only: bool,
    weights: Path | None,
) -> None:
    overrides, edits = split_edits(overrides)
    config = compose_config(name, overrides, folder)
    make_absolute(config)
    if config.model_path:
        os.environ["MODEL_PATH"] = str(config.model_path)
    workflow = load_edited(config.workflow, edits)
    check_overrides(config.workflow, config, workflow.edited)
    typed = typed_settings(overrides, folder)
    check_effects(typed, config, workflow, evaluate_only=evaluate_only)
    for key in typed.keys() & NO_EFFECT.keys():
        print(f"warning: {typed[key].argument} has no effect: {NO_EFFECT[key]}", file=sys.stderr)
    for warning in workflow.warnings:
        if not (evaluate_only and warning.training_only):
            print(warning.as_warning(), file=sys.stderr)
    if evaluate_only:
        check_output(config)
        weights = find_checkpoint(weights) if weights is not None else None
        workflow = evaluation_of(workflow, weights=weights, temperature=config.validation.temperature)
    elif not workflow.trained_policies():
        raise UserError(f"{config.workflow}: every policy is frozen, so there is nothing to train; use verl-dag eval")
    elif not config.data.train_files:
        raise UserError("data.train_files: training needs problems; pass data.train_files=FILE")
    else:
        check_samples(config, workflow)
    announce("importing torch and Ray")
    platform = choose_platform(config)
    prepare_environment(platform)
    load_user_code(workflow)  # it may import verl, which reads that environment
    if warning := shortage(int(config.rollout.max_in_flight), raise_limit()):
        print(f"warning: {warning}", file=sys.stderr)
    from recipe.dag.policy.cluster import Cluster
    from recipe.dag.policy.placement import plan_pools
    from recipe.dag.policy.shards import shortfall

    if not evaluate_only and config.trainer.save_freq > 0 and (warning := shortfall(config, workflow)):
        print(f"warning: {warning}", file=sys.stderr)
    for line in choose_defaults(config, workflow, platform):
        print(line, file=sys.stderr)
    shares = plan_pools(workflow, nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node)
    # Ray is shut down after the event loop, whose threads may wait for it until then
    with Cluster(config, shares, platform=platform) as cluster:
        options = {"platform": platform, "evaluate_only": evaluate_only, "evaluated": weights}
        asyncio.run(stop.run(run(config, workflow, **options, stop=stop, cluster=cluster)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.dag.main", description=__doc__.splitlines()[0])
    parser.add_argument("--config-path", type=Path, default=CONFIG_FOLDER, help="folder of the configuration")
    parser.add_argument("--config-name", default="dag", help="a file in that folder, without .yaml")
    parser.add_argument(
        "--eval", action="store_true", help="evaluate only: every policy frozen, results.json and summary.json"
    )
    keys = "settings of the run, and workflow.<key>=VALUE"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=keys)
    args = parser.parse_args(argv)
    try:
        launch(args.config_name, args.overrides, args.config_path, evaluate_only=args.eval)
    except WorkflowError as error:
        print(error, file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
