"""The loop: roll out, train, sync, validate, save, report.

Invariant: step s is a function of the weights after step s-1, the data and the seed. A step's results are on disk
(journal, then checkpoint) before the next one starts, and a resumed run discards anything written after the last
checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from itertools import groupby
from pathlib import Path

from omegaconf import DictConfig

from recipe.dag.coach.bias import BiasMonitor
from recipe.dag.coach.unreadable import silent_coach
from recipe.dag.core.errors import UserError
from recipe.dag.core.interrupt import Interruption, Stopped
from recipe.dag.episode.failure import most_frequent
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.policy.canary import canary_metrics
from recipe.dag.policy.policy import PolicyRuntime, sync_metrics
from recipe.dag.policy.scorer import ServerScorer
from recipe.dag.policy.shards import check_written
from recipe.dag.policy.snapshot import SnapshotPolicy
from recipe.dag.report.console import step_line
from recipe.dag.report.curve import why_not_drawn
from recipe.dag.report.display import Activity
from recipe.dag.report.journal import Journal
from recipe.dag.report.metrics import rollout_metrics, validation_metrics
from recipe.dag.report.monitors import Monitors
from recipe.dag.report.phases import PHASES, announce, phase
from recipe.dag.report.progress import TrainingPasses
from recipe.dag.report.results import write_results
from recipe.dag.report.starvation import Starvation
from recipe.dag.train import checkpoint
from recipe.dag.train.alternation import actor_updates_at, as_bound
from recipe.dag.train.call_filter import outside_loss, penalise_overlong, void_metrics
from recipe.dag.train.inputs import Inputs
from recipe.dag.train.resources import Resources
from recipe.dag.train.resume import way_back
from recipe.dag.train.role_baselines import RoleBaselines
from recipe.dag.train.rollout import roll_out
from recipe.dag.train.rollout_processes import SpreadRunner
from recipe.dag.train.sampling import describe, sampler_of
from recipe.dag.train.selection import IdleSteps, StepRollouts, collect
from recipe.dag.train.step import TrainingStep
from recipe.dag.train.throughput import ModelFlops, find_flops
from recipe.dag.train.tracking import Trackers
from recipe.dag.train.user_metrics import UserMetrics
from recipe.dag.types.record import Episode
from recipe.dag.workflow.schema import Workflow

logger = logging.getLogger(__name__)


class Trainer:
    """Runs the steps of a training run, from its start or from a checkpoint."""

    def __init__(
        self,
        config: DictConfig,
        workflow: Workflow,
        resources: Resources,
        inputs: Inputs,
        stop: Interruption | None = None,
    ):
        """`stop`: the signals that end the run early."""
        self.config, self.workflow, self.resources, self.inputs = config, workflow, resources, inputs
        self.stop = stop or Interruption()
        self.policies, self.mixing, self.start = resources.policies, resources.mixing, inputs.start
        self.runners: dict[tuple[str, ...], EpisodeRunner | SpreadRunner] = {}
        self.runner = self._runner_of(workflow)
        self.sampler = sampler_of(inputs.train, config.data.train_batch_size, config.seed, config.data.stratify_key)
        self.out = Path(config.output_dir)
        self.checkpoints = Path(config.trainer.default_local_dir)
        self.trained = [policy for policy in self.policies.values() if policy.trained]
        self.snapshots = [policy for policy in self.policies.values() if isinstance(policy, SnapshotPolicy)]
        self.total = int(config.trainer.total_training_steps)
        self.batches_consumed = 0
        """Batches of samples that the steps so far have rolled out."""
        self.sampled = 0
        """Tokens that the steps so far have sampled."""
        self.accuracies: dict[int, float] = {}
        self.faults: dict[str, str] = {}
        """Most frequent faults of the current step, for its step line."""
        self.curve_fault = ""
        """Why curve.png could not be written last time."""
        self.idle = IdleSteps(workflow)
        self.flops: dict[str, ModelFlops] = {}
        self.passes = TrainingPasses(enabled=config.rollout.progress)
        self.startup: float | None = None
        """Seconds from the process's start to the first rollout; None before that and once they are reported."""
        self.starvation = Starvation(workflow)
        self.monitors = Monitors(config.report.monitors, config.report.on_flag, workflow)
        self.coach_bias = BiasMonitor(int(config.report.coach_bias_steps))
        self.user_metrics = UserMetrics(config, workflow.path)
        self.baselines = RoleBaselines.for_algorithm(workflow.algorithm)
        self.complete: int | None = None
        """The step whose weights the policies hold; None while they are being updated."""
        self.saved = 0
        """The step of the last checkpoint."""

    async def train(self) -> None:
        step = await self._resume()
        for policy in self.trained:
            if (flops := await asyncio.to_thread(find_flops, policy)) is not None:
                self.flops[policy.name] = flops
        report = self.config.report
        self.journal = Journal(self.out, max_per_step=report.episodes_per_step, compress=report.compress)
        self.journal.truncate_after(step if step else -1)
        self.trackers = Trackers(self.config, self.workflow, step=step)
        failed = True
        self.complete = self.saved = step
        self.stop.take_notice()
        if strata := describe(self.sampler):
            print(strata, flush=True)
        try:
            announce("sending the weights to the inference servers")
            await self._sync_weights(step)
            self.startup = PHASES.ready()
            step = await self._steps(step)
            failed = False
        except UserError:
            await self._keep_complete_step()
            raise
        finally:
            self.trackers.finish(exit_code=1 if failed else 0)
        if step < self.total:
            return
        if self.accuracies:
            (first, before), (last, after) = (f(self.accuracies.items()) for f in (min, max))
            print(f"validation accuracy {before:.3f} at step {first}, {after:.3f} at step {last}")
        curve = "" if self.curve_fault else ", curve.png"
        print(f"results: {self.out}/results.json, summary.json, metrics.jsonl, episodes.jsonl{curve}")

    def _runner_of(self, workflow: Workflow) -> EpisodeRunner | SpreadRunner:
        """Return the runner for the workflow's binding of agents to policies; each binding has one."""
        key = tuple(agent.policy for agent in workflow.agents)
        if key not in self.runners:
            self.runners[key] = self.resources.runner(self.config, workflow)
        return self.runners[key]

    async def _steps(self, step: int) -> int:
        """Run the steps after `step` and return the last one completed; SIGTERM ends them early, after a checkpoint."""
        try:
            if step == 0 and (metrics := await self.stop.until_asked(self._evaluate(0))):
                await self._report(0, metrics)
            while step < self.total and not self.stop.asked:
                await self._step(step + 1)
                step += 1
        except Stopped:  # nothing has been learned since `step`
            pass
        if step < self.total:
            await self._leave(step)
        return step

    async def _leave(self, step: int) -> None:
        if step > self.saved and self.config.trainer.save_freq > 0:
            await self._save(step)
        self.stop.summary = f"stopped by SIGTERM after step {step} of {self.total}; {self.stop.way_back}"

    async def _step(self, step: int) -> None:
        """Run one step. Raises Stopped if SIGTERM arrives before anything is learned."""
        started = time.monotonic()
        workflow = as_bound(self.workflow, step - 1)
        rollouts = await self.stop.until_asked(self._collect(step, workflow))
        episodes = rollouts.episodes
        if problem := silent_coach(episodes, workflow) or self.monitors.problem(episodes):
            self.journal.episodes(step, episodes)
            raise UserError(f"step {step}: {problem}")
        self.batches_consumed += rollouts.batches
        metrics = rollout_metrics(
            episodes, workflow, versions={name: policy.version for name, policy in self.policies.items()}
        )
        own = [episode for episode in episodes if episode.forked is None]  # shares and means leave out forks
        metrics |= void_metrics(own, workflow) | self.resources.metrics() | rollouts.metrics
        metrics |= self.coach_bias.update(own) | self.monitors.metrics(own)
        self.sampled += int(metrics["tokens/sampled"])
        if (limit := self.config.trainer.total_training_tokens) is not None and self.sampled >= limit:
            self.total = step
        mark = time.monotonic()
        metrics["timing/rollout"] = mark - started
        metrics["perf/rollout/tokens_per_s"] = metrics["tokens/sampled"] / max(metrics["timing/rollout"], 1e-9)
        self.faults["fault"] = most_frequent(fault for episode in episodes for fault in episode.faults)

        self.complete = None
        seeds = [asyncio.to_thread(policy.seed, step) for policy in self.trained]
        await asyncio.gather(*seeds, *[policy.sleep() for policy in self.trained])
        training = TrainingStep(
            workflow,
            self.policies,
            rollouts.rows,
            episodes=episodes,
            mixing=self.mixing,
            baselines=self.baselines,
            flops=self.flops,
            passes=self.passes,
            step=step - 1,
            seed=self.config.seed + step,
        )
        metrics["timing/gap"], mark = time.monotonic() - mark, time.monotonic()
        await training.run()
        if self.config.report.token_columns:
            training.record_tokens(self.journal.kept(step, episodes))
        metrics |= training.metrics()
        for policy in self.trained:
            await asyncio.to_thread(policy.renew_reference, step)
        metrics["timing/train"] = time.monotonic() - mark
        self.idle.count(step, trained=int(metrics["train/rows"]), rows=rollouts.rows, episodes=episodes)

        mark = time.monotonic()
        with Activity(f"step {step}: weights to the inference servers", enabled=self.config.rollout.progress):
            await self._sync_weights(step)
        metrics["timing/sync"] = time.monotonic() - mark
        metrics |= canary_metrics([*self.trained, *self.snapshots]) | sync_metrics(self.policies.values())
        self.complete, stopped = step, None
        try:
            metrics |= await self.stop.until_asked(self._evaluate(step))
        except UserError as error:  # report the completed step first, then end the run
            stopped = error
        except Stopped:  # SIGTERM skips the evaluation; the completed step is still reported and saved
            pass
        metrics["timing/step"] = time.monotonic() - started
        self.journal.episodes(step, episodes)
        await self._report(step, metrics)
        for line in (*self.coach_bias.alarms, *self.starvation.lines(metrics, training.dominant_agents())):
            print(f"step {step}: {line}", flush=True)
        if stopped is not None:
            raise stopped
        if self._due(step, self.config.trainer.save_freq):
            await self._save(step)

    async def _keep_complete_step(self) -> None:
        """Save the last complete step before an error ends the run, unless it is saved already or checkpoints are
        off."""
        step = self.complete
        if step is None or step <= self.saved or self.config.trainer.save_freq <= 0:
            return
        try:
            await self._save(step)
        except Exception as error:  # the error that ends the run is the one to report
            logger.warning("step %d was not saved: %s: %s", step, type(error).__name__, error)
            return
        folder = checkpoint.step_folder(self.checkpoints, step)
        print(f"saved {folder}; to resume from it after changing code, add trainer.resume_mode=force", flush=True)

    async def _collect(self, step: int, workflow: Workflow) -> StepRollouts:
        runner = self._runner_of(workflow)

        async def roll_out_batch(number: int) -> list[Episode]:
            picks = self.sampler.batch(self.batches_consumed + number + 1)
            samples = [(self.inputs.train[index], f"{epoch}-{index}") for index, epoch in picks]
            n = int(self.config.actor_rollout_ref.rollout.n)
            title = f"step {step}: rollout" + f", batch {number + 1}" * bool(number)
            actors = [name for name in workflow.trained_policies() if actor_updates_at(workflow, name, step - 1)]
            episodes = await roll_out(self.config, runner, samples, n, step, validate=False, forked=actors, title=title)
            penalise_overlong(episodes, workflow, int(self.config.data.max_response_length))
            self.monitors.flag(episodes)
            return episodes

        spec = workflow.episode
        to_rows = partial(
            rows_of,
            merge=spec.merge_rows and not self._one_call_per_row(),
            on_failure=spec.on_failure,
            train_turns=spec.train_turns,
            keep_unsampled_rewarded=workflow.algorithm.team_value is None,  # a team value reads the episodes themselves
            unscored=workflow.algorithm.unscored_scope,
            outside_loss=lambda episode: outside_loss(episode, workflow) | self.monitors.masked(episode),
        )
        return await collect(roll_out_batch, to_rows, workflow, groups=self.sampler.batch_size)

    def _one_call_per_row(self) -> bool:
        """Return whether calls must not be merged into rows: the loss averages over rows, so a merged row would count
        once for all its calls, or the critic reads a separate prompt for each call."""
        algorithm = self.workflow.algorithm
        return algorithm.loss_agg == "seq-mean-token-mean" or algorithm.joint_critic

    def _due(self, step: int, frequency: int) -> bool:
        return frequency > 0 and (step % frequency == 0 or step == self.total)

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics that are due after a step: the user's, and those of a validation. Step 0 is the start."""
        metrics: dict[str, float] = {}
        if self.user_metrics.due(step, self.total):
            scorers = {name: ServerScorer(policy) for name, policy in self.policies.items()}
            metrics |= await self.user_metrics.measure(scorers)
        trainer = self.config.trainer
        due = trainer.val_before_train if step == 0 else self._due(step, trainer.test_freq)
        return metrics | await self._validate(step) if due and self.inputs.val else metrics

    async def _validate(self, step: int) -> dict[str, float]:
        started = time.monotonic()
        samples = [(sample, f"val-{index}") for index, sample in enumerate(self.inputs.val)]
        n, title = self.config.validation.n, f"step {step}: validation"
        episodes = await roll_out(self.config, self.runner, samples, n, step, validate=True, title=title)
        write_results(self.out, episodes, self.workflow)
        self.journal.episodes(step, episodes, split="validation")
        metrics = validation_metrics(episodes, self.workflow)
        self.faults["val_fault"] = most_frequent(fault for episode in episodes for fault in episode.faults)
        return metrics | {"timing/validation": time.monotonic() - started}

    async def _sync_weights(self, version: int) -> None:
        """Send the weights to the servers and check that they arrived: policies of one pool in turn, but adapters of
        one base and different pools at the same time."""

        async def sync(policies: list[PolicyRuntime]) -> None:
            for _, group in groupby(policies, key=lambda policy: id(policy.processes)):
                first, *others = group
                async with first.pool.turn(first.processes):
                    await asyncio.gather(*[policy.sync_weights(version) for policy in (first, *others)])

        for snapshot in self.snapshots:  # first, while the servers of its source sleep and leave memory to the trainer
            await snapshot.refresh(version)
        pools: dict[int, list[PolicyRuntime]] = {}
        for policy in self.trained:
            pools.setdefault(id(policy.pool), []).append(policy)
        await asyncio.gather(*[sync(policies) for policies in pools.values()])

    def _run_info(self) -> dict:
        """Return what a checkpoint's run.json says about the run."""
        return {
            "policies": {p.name: p.workers.world_size for p in self.trained},
            "critics": [policy.name for policy in self.trained if policy.critic],
            "references": [policy.name for policy in self.trained if policy.renews_reference],
            "drawn": self.batches_consumed,
            "sampled": self.sampled,
            "coach_bias": self.coach_bias.state(),
            **({"user_metrics": state} if (state := self.user_metrics.state) else {}),
            **({"role_baselines": self.baselines.state} if self.baselines is not None else {}),
            **({"api_usage": spent} if (spent := self.resources.remotes.counts()) else {}),
            "fingerprint": self.inputs.fingerprint.items,
        }

    async def _save(self, step: int) -> None:
        def write(folder: Path) -> None:
            kept = [*self.trained, *self.snapshots]
            for policy in kept:
                policy.save(folder / policy.name, step)
            if self.mixing is not None:
                self.mixing.save(folder)
            check_written(folder, [model for policy in kept for model in policy.saved()])

        keep = self.config.report.keep_checkpoints
        complete, self.complete = self.complete, None  # a checkpoint that fails is not tried a second time
        with phase(f"saving step {step}"), checkpoint.full_disk_named(self.checkpoints, step):
            await asyncio.to_thread(checkpoint.save, self.checkpoints, step, self._run_info(), write, keep=keep)
        self.complete = complete
        self.saved = step
        self.stop.way_back = way_back(self.config, self.start, step)

    async def _resume(self) -> int:
        if self.start is None:
            return 0
        folder, self.batches_consumed, self.sampled = self.start.folder, self.start.batches_consumed, self.start.sampled
        self.coach_bias.restore(self.start.coach_bias)
        self.user_metrics.state = dict(self.start.user_metrics)
        if self.baselines is not None:
            self.baselines.state = dict(self.start.role_baselines)
        for policy in self.trained:
            await asyncio.to_thread(policy.load, folder / policy.name)
        for snapshot in self.snapshots:
            await snapshot.load_snapshot(folder / snapshot.name)
        if self.mixing is not None:
            self.mixing.load(folder)
        print(f"resumed from {folder}")
        return self.start.step

    async def _report(self, step: int, metrics: dict[str, float]) -> None:
        if self.startup is not None:
            metrics["timing/startup"], self.startup = self.startup, None
        if "val/accuracy" in metrics:
            self.accuracies[step] = metrics["val/accuracy"]
        self.journal.metrics(step, metrics)
        self.resources.remotes.save()
        self.trackers.log(metrics, step)
        print(step_line(step, self.total, metrics, **self.faults), flush=True)
        self.faults.clear()
        await asyncio.to_thread(self._draw_curve)

    def _draw_curve(self) -> None:
        fault = why_not_drawn(self.out / "metrics.jsonl", self.out / "curve.png")
        if fault not in ("", self.curve_fault):
            logger.warning("curve.png was not written, and is tried again after every step: %s", fault)
        self.curve_fault = fault
