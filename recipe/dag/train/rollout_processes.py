"""Large batches of episodes, run by several processes beside the run's own.

Invariant: a record does not depend on which process made it, nor on the number of processes: each has its own workflow,
tools, hooks and clients of the policies' servers, and the same seeds. One process runs all episodes of a problem. When
`run_episodes` returns or raises, none of its work is still running. Only the run's own process restarts the local
sandbox.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.endpoint.client import Endpoint
from recipe.dag.episode.batch import keys_of, run_batch
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.shipment import unpack
from recipe.dag.episode.tool_limits import most_processes
from recipe.dag.train.rollout_worker import RolloutWorker, Samples, WorkerSpec
from recipe.dag.types.record import Episode
from recipe.dag.workflow.plan import max_forks
from recipe.dag.workflow.schema import Workflow

logger = logging.getLogger(__name__)

EPISODES_PER_PROCESS = 512
"""A process is not worth starting for fewer: it runs about 300 episodes a second."""
MAX_PROCESSES = 16
START_S, STOP_S = 300.0, 10.0
ADVICE = "pass rollout.processes=1 to run all episodes in the run's own process"


def count_processes(run: DictConfig, workflow: Workflow, episodes: int) -> int:
    """Return the number of processes for batches of up to `episodes`. Raises UserError if the configuration asks for
    more than the limit of a tool or an API can be divided among."""
    count = choose_processes(run.rollout.processes, episodes, cores())
    most, option = most_processes(workflow) or (count, "")
    if count > most and run.rollout.processes != "auto":
        raise UserError(
            f"rollout.processes={run.rollout.processes}: {option}, fewer than one for each process; raise it, or "
            f"pass rollout.processes={most}"
        )
    return min(count, most)


def choose_processes(setting: int | str, episodes: int, cores: int) -> int:
    """Return the number of processes for a batch of `episodes`; 1 is the run's own. `setting` is auto or a number."""
    if setting != "auto":
        return max(1, min(int(setting), episodes))
    return max(1, min(episodes // EPISODES_PER_PROCESS, cores, MAX_PROCESSES))


class RolloutProcesses:
    """The driver's side of `count` RolloutWorkers."""

    def __init__(self, workers: Sequence[Any], endpoints: Mapping[str, Endpoint], ensure: Callable | None):
        self._workers, self._endpoints, self._ensure = workers, endpoints, ensure

    @classmethod
    async def start(
        cls, count: int, spec: WorkerSpec, endpoints: Mapping[str, Endpoint], ensure: Callable | None = None
    ) -> RolloutProcesses:
        """Start `count` workers on this machine, and divide the limits of `spec` among them. `ensure`: restarts the
        sandbox. Raises UserError if they do not start."""
        if spec.sandbox is not None:
            share = {**spec.sandbox, "max_concurrent": -(-spec.sandbox["max_concurrent"] // count)}
            spec = replace(spec, sandbox=share, restarts=ensure is not None)
        spec = replace(spec, threads=max(1, cores() // count))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        worker = ray.remote(RolloutWorker).options(num_cpus=0, scheduling_strategy=here)
        workers = [worker.remote(replace(spec, share=(index, count))) for index in range(count)]
        try:
            await asyncio.wait_for(asyncio.gather(*(worker.ready.remote() for worker in workers)), START_S)
        except (RayActorError, TimeoutError) as error:
            reason = " ".join(str(error).split())[:300] or f"no answer within {START_S:.0f} s"
            raise UserError(f"the processes that run episodes did not start ({reason}); {ADVICE}") from error
        return cls(workers, endpoints, ensure)

    @property
    def count(self) -> int:
        return len(self._workers)

    async def run_episodes(
        self,
        workflow: Workflow,
        samples: Samples,
        n: int,
        *,
        count: int,
        max_in_flight: int = 512,
        on_done: Callable[[Episode], None] | None = None,
        **options: Any,
    ) -> list[Episode]:
        """Return what `play_batch` returns, using the first `count` processes. Raises UserError."""
        count = min(count, len(samples))
        options["max_in_flight"] = -(-max_in_flight // count)
        # a list per key, because a sample may occur twice in a batch
        arrived: dict[tuple[str, int], list[Episode]] = defaultdict(list)

        def receive(episode: Episode) -> None:
            arrived[episode.uid, episode.index].append(unpack(episode, self._endpoints))
            if on_done is not None:
                on_done(episode)

        workers = self._workers[:count]
        tasks = [
            asyncio.ensure_future(self._follow(worker, workflow, samples[number::count], n, options, receive))
            for number, worker in enumerate(workers)
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException as error:  # also CancelledError
            for task in tasks:
                task.cancel()
            await self._end(workers, "stop")
            await asyncio.gather(*tasks, return_exceptions=True)
            if not isinstance(error, RayActorError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"a process that runs episodes died ({reason}); {ADVICE}") from error
        skip = options.get("skip", ())
        episodes = []
        for _, uid in samples:
            for index in (index for index in range(n) if (uid, index) not in skip):
                episodes.append(arrived[uid, index].pop(0))
                while arrived.get((uid, index := index + n)):  # its forks
                    episodes.append(arrived[uid, index].pop(0))
        return episodes

    async def _follow(
        self, worker: Any, workflow: Workflow, samples: Samples, n: int, options: dict, receive: Callable
    ) -> None:
        """Have one worker run its samples, and handle its messages until it has finished."""
        async for reference in worker.run_episodes.remote(workflow, samples, n, options):
            kind, value = await reference
            if kind == "error":
                raise UserError(value)
            if kind == "sandbox":
                assert self._ensure is not None  # a worker asks only if its WorkerSpec says that the run can restart it
                try:
                    await self._ensure()
                except (SandboxFault, OSError) as error:  # the worker's next attempts show whether the sandbox is back
                    logger.warning("the sandbox could not be restarted: %s", error)
                await worker.sandbox_checked.remote()
            else:
                for episode in value:
                    receive(episode)

    async def close(self) -> None:
        await self._end(self._workers, "close")
        for worker in self._workers:
            ray.kill(worker)

    async def _end(self, workers: Sequence[Any], method: str) -> None:
        """Call `method` on each worker, including dead ones, and wait at most STOP_S for all of them."""
        calls = [asyncio.wrap_future(getattr(worker, method).remote().future()) for worker in workers]
        await asyncio.wait(calls, timeout=STOP_S)
        for call in calls:
            if call.done() and not call.cancelled():
                call.exception()  # retrieved, so that asyncio does not log the error of a dead worker


class SpreadRunner:
    """An EpisodeRunner whose large batches are run by `processes`."""

    def __init__(self, runner: EpisodeRunner, workflow: Workflow, processes: RolloutProcesses, setting: int | str):
        self._runner, self._workflow, self._processes, self._setting = runner, workflow, processes, setting

    @property
    def scores_groups(self) -> bool:
        return self._runner.scores_groups

    async def run_batch(
        self, samples: Samples, n: int, *, step: int, earlier: Sequence[Episode] = (), **options: Any
    ) -> list[Episode]:
        """Return what the function `run_batch` returns; raise what it raises. Groups are scored in the run's own
        process, where the `earlier` episodes are."""
        most = len(samples) * n * (1 + max_forks(self._workflow) if options.get("forked") else 1)
        count = min(choose_processes(self._setting, most, cores()), self._processes.count)
        if count == 1:
            return await run_batch(self._runner, samples, n, step=step, earlier=earlier, **options)
        options |= {"step": step, "skip": keys_of(earlier)}
        episodes = await self._processes.run_episodes(self._workflow, samples, n, count=count, **options)
        await self._runner.finish(episodes, f"step {step}", earlier=earlier)
        return episodes


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
