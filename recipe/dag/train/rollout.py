"""The episodes of a step, a validation or an evaluation, run with progress and a log.

Invariant: nothing here needs Ray, verl or torch, so that an evaluation of models behind servers runs without them.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.report.evaluation_log import EvaluationLog
from recipe.dag.report.progress import Progress
from recipe.dag.types.record import Episode

if TYPE_CHECKING:
    from recipe.dag.train.data import Sample
    from recipe.dag.train.rollout_processes import SpreadRunner


EPISODES_PER_GPU = 512


def episodes_at_once(config: DictConfig) -> int:
    """Return how many episodes of a run may be under way. A machine without GPUs counts as one."""
    trainer = config.trainer
    return config.rollout.max_in_flight or EPISODES_PER_GPU * (trainer.n_gpus_per_node or 1) * trainer.nnodes


async def roll_out(
    config: DictConfig,
    runner: EpisodeRunner | SpreadRunner,
    samples: list[tuple[Sample, str]],
    n: int,
    step: int,
    *,
    validate: bool,
    title: str,
    forked: Collection[str] = (),
    log: EvaluationLog | None = None,
) -> list[Episode]:
    """Run n episodes of each (sample, uid), with a progress bar. forked: the policies at whose calls an algorithm with
    forks makes them. log: where each is recorded as it ends, and those that it holds already are left out."""
    earlier = [] if log is None else list(log.finished.values())
    with Progress(len(samples) * n - len(earlier), title, enabled=config.rollout.progress) as progress:

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
            forked=forked,
            max_in_flight=episodes_at_once(config),
            earlier=earlier,
            on_done=done,
        )
