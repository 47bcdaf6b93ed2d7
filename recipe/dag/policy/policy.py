"""One policy at run time: its workers, its servers, and the weight sync between them.

Invariant: the servers always hold one complete version of the weights, `version`, and return it with each generation.
While a policy trains, its servers sleep (hybrid placement); a frozen policy has only servers. A critic runs in its
policy's workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name

from recipe.dag.core.errors import UserError
from recipe.dag.core.tasks import together
from recipe.dag.endpoint.client import GenerationClient, PolicyEndpoint
from recipe.dag.policy import jagged
from recipe.dag.policy.canary import Canary, number_format, prompt_of
from recipe.dag.policy.placement import Pool
from recipe.dag.policy.servers import PolicyServerManager, ServerClient, replica_class
from recipe.dag.policy.shards import REFERENCE_CONTENTS, Saved
from recipe.dag.policy.tokenizer import shared_tokenizer
from recipe.dag.report.phases import announce
from recipe.dag.workflow.agent_schema import Reference


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The picklable description from which another process makes the policy's endpoint."""

    client: GenerationClient
    tokenizer: str
    trust_remote_code: bool
    max_model_len: int
    max_response_length: int

    def endpoint(self) -> PolicyEndpoint:
        tokenizer = shared_tokenizer(self.tokenizer, trust_remote_code=self.trust_remote_code)
        return PolicyEndpoint(self.client, tokenizer, self.max_model_len, self.max_response_length)


class PolicyRuntime:
    """A policy's processes: call `start` once, then `sync_weights`, `sleep`, `save` and `load`."""

    def __init__(
        self,
        name: str,
        config: DictConfig,
        pool: Pool,
        *,
        trained: bool,
        reference: Reference | None = None,
        critic: bool = False,
    ):
        self.name, self.config, self.pool = name, config, pool
        self.trained, self.reference, self.critic = trained, reference, critic
        self.version = 0
        self.workers: Any = None
        self._launch: asyncio.Task[None] | None = None
        self.replicas: list[Any] = []
        model = config.actor_rollout_ref.model
        self.tokenizer = shared_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        self.endpoint: PolicyEndpoint | None = None
        self.canary: Canary | None = None
        self.adapter: str | None = None
        """The servers' name of the policy, if it is not their model."""
        self.processes: PolicyRuntime = self
        """Whose workers and servers the policy's are."""
        self.seconds: dict[str, float] = {}
        """Part of a sync -> the seconds that the last one took."""

    @property
    def has_workers(self) -> bool:
        """Whether it has trainer processes of its own."""
        return self.trained

    async def start(self) -> None:
        """Launch the workers, then the servers, which end up asleep (trained policy) or ready (frozen policy)."""
        if self.trained:
            extras = ["the reference"] * (self.reference is not None) + ["a critic"] * self.critic
            suffix = f", with {' and '.join(extras)}" if extras else ""
            announce(f"policy {self.name}: loading {self.config.actor_rollout_ref.model.path} to train it{suffix}")
            await self.launch()
        else:
            self.serve_from_disk()
        await self._start_servers()

    async def launch(self) -> None:
        """Launch the workers' processes, once; their imports take tens of seconds. `start` waits for it."""
        if self.has_workers:
            if self._launch is None:
                self._launch = asyncio.create_task(asyncio.to_thread(self._start_workers))
            await asyncio.shield(self._launch)

    def serve_from_disk(self) -> None:
        """Let the servers load their weights, which no sync replaces."""
        with open_dict(self.config):
            # verl's default, `dummy`, is random weights that a sync replaces; these servers get none
            self.config.actor_rollout_ref.rollout.load_format = "auto"
            # verl requires it for servers without a trainer; the default is 0
            self.config.actor_rollout_ref.rollout.nnodes = 1

    async def _start_servers(self) -> None:
        """Launch the servers, and put those to sleep that share their devices with workers, which load beside them."""
        # seconds, in which the workers' processes start
        await asyncio.to_thread(replica_class, self.config.actor_rollout_ref.rollout.name)
        pool = None if get_device_name() == "cpu" else self.pool.resources
        servers = PolicyServerManager.create(self.config, self.name, worker_group=self.workers, frozen_pool=pool)
        results: list[Any] = await together([servers, self._load()])
        manager: PolicyServerManager = results[0]
        rollout = self.config.actor_rollout_ref.rollout
        self.replicas = manager.get_replicas()
        if self.workers is not None:
            engine = omega_conf_to_dataclass(rollout.checkpoint_engine)
            self.sync = CheckpointEngineManager(config=engine, actor_wg=self.workers, replicas=self.replicas)
            # the next policy's server takes a share of the memory that is free when it starts
            await self.sync.sleep_replicas()
            self.canary = await self.canary_of(self.name, self.workers)
        self.client = manager.get_client()
        self.endpoint = self.endpoint_of(self.name)

    async def canary_of(self, name: str, workers: Any, adapter: str | None = None) -> Canary | None:
        """Return the canary of policy `name` on these servers, which sleep, as whenever the workers score it: it needs
        the memory of gathered weights. None if the run has none."""
        if not self.config.rollout.canary:
            return None
        rollout = self.config.actor_rollout_ref.rollout
        prompt = prompt_of(self.tokenizer, rollout.max_model_len)
        await asyncio.to_thread(workers.score_canary, prompt)
        return Canary(name, prompt, self.replicas, number_format(rollout), adapter=adapter)

    def endpoint_of(self, name: str, adapter: str | None = None) -> PolicyEndpoint:
        """Return the endpoint of policy `name`, which the started servers generate for. `adapter`: their name of it, if
        it is not their model."""
        client = ServerClient(self.client, name, seeded=get_device_name() == "cpu", adapter=adapter)
        longest = int(self.config.data.max_response_length)
        return PolicyEndpoint(client, self.tokenizer, self.config.actor_rollout_ref.rollout.max_model_len, longest)

    def spec(self) -> PolicySpec:
        """Return the description of the started policy for other processes."""
        model, endpoint = self.config.actor_rollout_ref.model, self.endpoint
        assert endpoint is not None  # made by start()
        path = model.tokenizer_path or model.path
        longest = int(self.config.data.max_response_length)
        return PolicySpec(endpoint.client, path, model.trust_remote_code, endpoint.max_model_len, longest)

    async def _load(self) -> None:
        """Load the models, after the servers' first question to the workers: so the servers' processes start beside the
        load. If the question comes later, they start after it."""
        if self.workers is not None:
            await asyncio.sleep(0.1)
            await asyncio.to_thread(self.workers.init_model)
        announce(f"policy {self.name}: starting its inference servers")

    def _start_workers(self) -> None:
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

        jagged.register()  # each call of the workers cuts its rows for their ranks
        worker_class, arguments = self._worker()
        worker = RayClassWithInitArgs(ray.remote(worker_class), config=self.config.actor_rollout_ref, **arguments)
        self.workers = RayWorkerGroup(self.pool.resources, worker, device_name=get_device_name())

    def _worker(self) -> tuple[type, dict[str, Any]]:
        """Return the class of the workers, and its arguments besides the configuration."""
        from recipe.dag.policy.worker import PolicyWorker

        role = "actor_rollout" if self.reference is None else "actor_rollout_ref"
        return PolicyWorker, {"role": role, "critic": self.config.critic if self.critic else None}

    def kill(self) -> None:
        """Kill all processes immediately. Pending calls to them raise Ray's error."""
        import ray

        workers = self.workers.workers if self.workers is not None else []
        for actor in [*workers, *(server for replica in self.replicas for server in replica.servers)]:
            ray.kill(actor)

    @property
    def data_parallel_size(self) -> int:
        # a list: rank -> its data-parallel index
        return max(self.workers._query_dispatch_info("actor")) + 1

    async def sync_weights(self, version: int) -> None:
        """Send the trainer's current weights to the servers as `version`, and wake them. Raises UserError if a server
        then has others."""
        with self.timed("send"):
            await asyncio.to_thread(run_sync, self.sync, version)
        self.version = version
        await self._check_canary(version)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - started

    async def _check_canary(self, version: int) -> None:
        if self.canary is not None:
            scored = await asyncio.to_thread(self.workers.score_canary, self.canary.prompt)
            log_probs, seconds = scored[0]  # of rank 0, which has the engine's outputs
            await self.canary.check(log_probs, version, seconds=seconds)

    async def sleep(self) -> None:
        """Free the servers' GPU memory for training; a frozen policy's servers stay ready."""
        if self.trained:
            await self.sync.sleep_replicas()

    def seed(self, step: int) -> None:
        """Reset the random state of every worker to that of `step`."""
        self.workers.seed_random_state(step)

    @property
    def renews_reference(self) -> bool:
        return self.reference is not None and self.reference.refresh is not None

    def renew_reference(self, step: int) -> None:
        """Copy the weights after `step` to the reference, if it is due."""
        if self.reference is not None and self.reference.refresh is not None and step % self.reference.refresh == 0:
            self.workers.renew_reference()

    def save(self, folder: Path, step: int) -> None:
        """Save the actor to `folder`/actor, the critic, if there is one, to `folder`/critic, and a reference that is
        renewed to `folder`/reference."""
        self.workers.save_checkpoint(str(folder / "actor"), None, step)
        if self.critic:
            self.workers.save_critic(str(folder / "critic"), step)
        if self.renews_reference:
            self.workers.save_reference(str(folder / "reference"))

    def saved(self) -> list[Saved]:
        """Return the models that `save` writes, by their folders in the checkpoint."""
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        ranks = self.workers.world_size
        models = [Saved(f"{self.name}/actor", ranks, tuple(actor.checkpoint.save_contents))]
        if self.critic:
            models.append(Saved(f"{self.name}/critic", ranks, tuple(critic.checkpoint.save_contents)))
        if self.renews_reference:
            models.append(Saved(f"{self.name}/reference", ranks, REFERENCE_CONTENTS))
        return models

    def load(self, folder: Path) -> None:
        """Load what `save` wrote to `folder`. Raises UserError if there is anything else in it."""
        try:
            self._restore(folder)
            if self.canary is not None:
                self.workers.score_canary(self.canary.prompt)
        except UserError as error:  # Ray's copy of a worker's error, whose text is a traceback
            raise UserError(str(getattr(error, "cause", error))) from error

    def _restore(self, folder: Path) -> None:
        self.workers.load_checkpoint(str(folder / "actor"))
        if self.critic:
            self.workers.load_critic(str(folder / "critic"))
        if self.renews_reference:
            self.workers.load_reference(str(folder / "reference"))


def sync_metrics(policies: Iterable[PolicyRuntime]) -> dict[str, float]:
    """Return the seconds that the parts of the last syncs took."""
    return {f"timing/{policy.name}.{part}": value for policy in policies for part, value in policy.seconds.items()}


def run_sync(sync: CheckpointEngineManager, version: int) -> None:
    """Run `update_weights` to its end; called in a thread, because it blocks in ray.get inside a coroutine."""
    asyncio.run(_update(sync, version))


async def _update(sync: CheckpointEngineManager, version: int) -> None:
    await sync.update_weights(global_steps=version)
