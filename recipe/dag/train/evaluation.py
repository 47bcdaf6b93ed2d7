"""Episodes of a run, with progress and a log, and evaluations made of them.

Invariant: nothing here needs Ray, verl or torch, so that an evaluation of models behind servers runs without them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.report.evaluation_log import EvaluationLog
from recipe.dag.report.progress import Progress
from recipe.dag.report.results import write_results
from recipe.dag.types.record import Episode

if TYPE_CHECKING:
    from recipe.dag.train.data import Sample
    from recipe.dag.train.rollout_processes import SpreadRunner


async def roll_out(
    config: DictConfig,
    runner: EpisodeRunner | SpreadRunner,
    samples: list[tuple[Sample, str]],
    n: int,
    step: int,
    *,
    validate: bool,
    title: str,
    log: EvaluationLog | None = None,
) -> list[Episode]:
    """Run n episodes of each (sample, uid), with a progress bar. log: where each is recorded as it ends, and those that
    it holds already are left out."""
    skip = () if log is None else log.finished.keys()
    with Progress(len(samples) * n - len(skip), title, enabled=config.rollout.progress) as progress:

        def done(episode: Episode) -> None:
            progress.update(episode)
            if log is not None:
                log.add(episode)

        run_episodes = partial(run_batch, runner) if isinstance(runner, EpisodeRunner) else runner.run_batch
        return await run_episodes(
            samples,
            n,
            step=step,
            validate=validate,
            max_in_flight=config.rollout.max_in_flight,
            skip=set(skip),
            on_done=done,
        )


async def evaluate(
    config: DictConfig, runner: EpisodeRunner | SpreadRunner, samples: list[Sample], identity: dict[str, Any]
) -> dict:
    """Run the runner's workflow on `samples` without training, write results.json and summary.json, and return the
    summary. Episodes that an earlier run with the same identity left in the folder are not run again."""
    pairs = [(sample, f"val-{index}") for index, sample in enumerate(samples)]
    n, seed = config.validation.n, config.seed
    log = EvaluationLog(config.output_dir, {**identity, "n": n, "seed": seed})
    if log.finished:
        print(f"{log.path}: holds {len(log.finished)} of {len(pairs) * n} episodes; the others are run", flush=True)
    episodes = await roll_out(config, runner, pairs, n, 0, validate=True, title="evaluation", log=log)
    uids = [uid for _, uid in pairs]
    return write_results(Path(config.output_dir), [*log.finished.values(), *episodes], uids)
