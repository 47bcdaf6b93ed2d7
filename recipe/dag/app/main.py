"""`python -m recipe.dag.main [--config-path FOLDER] [--config-name NAME] [--eval] key=value ...`: train or evaluate a
workflow.

Invariant: every run script ends here, on a laptop and on a GPU host. A mistake of the user is one line on stderr and
exit code 2, before Ray starts and before a file is written.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from recipe.dag.app.evaluate import check_conversations, check_output, evaluation_of, find_checkpoint
from recipe.dag.app.preflight import check_run
from recipe.dag.app.run import run
from recipe.dag.core.errors import UserError
from recipe.dag.core.interrupt import Interrupted, Interruption
from recipe.dag.core.open_files import shortage
from recipe.dag.core.output_lock import locked
from recipe.dag.core.problem import WorkflowError
from recipe.dag.episode.load import load_user_code
from recipe.dag.platform.environment import choose_platform, prepare_environment
from recipe.dag.report.phases import announce, end_phase
from recipe.dag.settings.compose import CONFIG_FOLDER
from recipe.dag.settings.verl_run import NO_EFFECT
from recipe.dag.tools.sandbox import raise_limit
from recipe.dag.workflow.schema import Workflow

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from recipe.dag.settings.typed import Typed
    from recipe.dag.types.model import Api


def choose_defaults(config: DictConfig, workflow: Workflow, platform: str) -> Iterator[str]:
    """Fill in the settings that `config` leaves open, and yield lines that report them.

    Raises UserError if the run does not fit on the visible GPUs.
    """
    import torch

    from recipe.dag.settings import defaults
    from recipe.dag.train.models import find_models
    from recipe.dag.workflow.machine import this_machine

    if platform == "cpu":
        defaults.apply(config, defaults.on_cpu(config))
        return
    find_models(workflow)  # downloads config.json from the hub to the cache, where the estimate reads it
    machine = this_machine()
    decision = defaults.decide(config, workflow, machine, visible=torch.cuda.device_count())
    defaults.apply(config, decision)
    defaults.check_servers(config, workflow)
    yield from defaults.describe(decision, machine, config, trains=bool(workflow.trained_policies()))
    yield from defaults.describe_memory(decision, machine)


def launch(
    name: str,
    overrides: list[str],
    folder: Path | None = None,
    *,
    evaluate_only: bool = False,
    weights: Path | None = None,
    api: Api | None = None,
) -> Path:
    """Compose the configuration, check it, run, and return the output folder. `weights`: a checkpoint to evaluate;
    `api`: a server's model that plays all policies of an evaluation.

    Raises UserError before anything is started, and SystemExit with the shell's code after a signal ended the run.
    """
    with Interruption() as stop:
        try:
            try:
                output = _launch(name, overrides, folder, stop, evaluate_only=evaluate_only, weights=weights, api=api)
            finally:
                end_phase()
        except Interrupted as interrupted:
            _end_interrupted(stop, interrupted, evaluate_only=evaluate_only)
        except UserError:
            raise
        except Exception as error:
            if stop.signum is None:
                raise
            # the run's processes got the signal, too (Slurm sends it to all), and their end caused this error
            cause = f": {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            _end_interrupted(stop, Interrupted(stop.signum), cause, evaluate_only=evaluate_only)
        if stop.summary:
            assert stop.signum is not None  # only a stopped run has a summary
            print(stop.summary, file=sys.stderr)
            raise SystemExit(128 + stop.signum)
    return output


def _end_interrupted(stop: Interruption, signalled: Interrupted, cause: str = "", *, evaluate_only: bool) -> NoReturn:
    """Print how to continue a run that a signal ended, and exit with the shell's code. `cause`: the resulting error."""
    outcome = "the same command goes on where it was" if evaluate_only else stop.way_back
    print(f"interrupted ({signalled}{cause}); {outcome}", file=sys.stderr)
    raise SystemExit(signalled.exit_code) from None


def _launch(
    name: str,
    overrides: list[str],
    folder: Path | None,
    stop: Interruption,
    *,
    evaluate_only: bool,
    weights: Path | None,
    api: Api | None,
) -> Path:
    checked = check_run(name, overrides, folder, evaluate_only=evaluate_only, all_by_api=api is not None)
    config, workflow = checked.config, checked.workflow
    _print_warnings(checked.typed, workflow, evaluate_only=evaluate_only)
    if evaluate_only:
        check_output(config)
        weights = find_checkpoint(weights) if weights is not None else None
        workflow = evaluation_of(workflow, weights=weights, temperature=config.validation.temperature, api=api)
        check_conversations(config, workflow)
    else:
        _check_trainable(config, workflow)
    with locked([config.output_dir] if evaluate_only else [config.output_dir, config.trainer.default_local_dir]):
        try:
            _run(config, workflow, stop, evaluate_only=evaluate_only, weights=weights)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            file = error.filename or config.output_dir
            raise UserError(f"{file}: cannot be written: {error.strerror}; make room; {stop.way_back}") from error
    return Path(config.output_dir)


def _run(
    config: DictConfig, workflow: Workflow, stop: Interruption, *, evaluate_only: bool, weights: Path | None
) -> None:
    if not workflow.local_policies():
        load_user_code(workflow)
        options: dict[str, Any] = {"platform": "none", "evaluate_only": True}
        asyncio.run(stop.run(run(config, workflow, **options, stop=stop, cluster=None)))
        return
    announce("importing torch and Ray")
    platform = choose_platform(config)
    prepare_environment(platform)
    load_user_code(workflow)  # only now: it may import verl, which reads that environment
    if warning := shortage(int(config.rollout.max_in_flight), raise_limit()):
        print(f"warning: {warning}", file=sys.stderr)
    from recipe.dag.policy.cluster import Cluster
    from recipe.dag.policy.shards import shortfall
    from recipe.dag.settings.pools import plan_pools

    if not evaluate_only and config.trainer.save_freq > 0 and (warning := shortfall(config, workflow)):
        print(f"warning: {warning}", file=sys.stderr)
    for line in choose_defaults(config, workflow, platform):
        print(line, file=sys.stderr)
    pools = plan_pools(workflow, nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node)
    # Ray must outlive the event loop, whose threads may still wait for it
    with Cluster(config, pools, platform=platform) as cluster:
        options = {"platform": platform, "evaluate_only": evaluate_only, "evaluated": weights}
        asyncio.run(stop.run(run(config, workflow, **options, stop=stop, cluster=cluster)))


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


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipe.dag.main", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config-path", type=Path, default=CONFIG_FOLDER, help="folder of the configuration")
    parser.add_argument("--config-name", default="dag", help="a file in that folder, without .yaml")
    parser.add_argument(
        "--eval", action="store_true", help="evaluate only: every policy frozen, results.json and summary.json"
    )
    parser.add_argument("--check", action="store_true", help="check configuration and workflow, and start nothing")
    keys = "settings of the run, and workflow.<key>=VALUE"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=keys)
    args = parser.parse_args(argv)
    try:
        if args.check:
            check_run(args.config_name, args.overrides, args.config_path, evaluate_only=args.eval)
        else:
            launch(args.config_name, args.overrides, args.config_path, evaluate_only=args.eval)
    except WorkflowError as error:
        print(error, file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
