"""Adapters at run time: a host with the base's processes, and each adapter as a policy on it.

Invariant: the host is started once and has one trainer and one set of servers. An adapter has the interface of a policy
and names itself in each call. Servers answer with the version that was the last one when a request arrived; the base is
loaded from disk and never sent. Sleeping servers load an adapter as soon as its last update of a step has ended, while
others are trained; `sync_weights` waits for it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from recipe.dag.policy.adapter_config import TrainedAdapter, critic_of
from recipe.dag.policy.placement import Pool
from recipe.dag.policy.policy import PolicyRuntime, run_sync
from recipe.dag.policy.shards import Saved, adapters_saved
from recipe.dag.report.phases import announce
from recipe.dag.workflow.agent_schema import Reference

SHARED_MEMORY = Path("/dev/shm")


class AdapterHost(PolicyRuntime):
    """The processes of a base and its adapters. As a policy, it is the frozen base."""

    def __init__(self, name: str, config: DictConfig, pool: Pool, adapters: Sequence[TrainedAdapter]):
        """`adapters`: those that are trained; without any, there are servers only."""
        super().__init__(name, config, pool, trained=False)
        self.adapters = tuple(adapters)
        self.awake = False
        self.collective = asyncio.Lock()
        """Held during a sync's calls of the workers with collectives, which all ranks then get in one order."""

    @property
    def has_workers(self) -> bool:
        return bool(self.adapters)

    async def start(self) -> None:
        if self.has_workers:
            names = ", ".join(adapter.name for adapter in self.adapters)
            announce(f"policy {self.name}: loading {self.config.actor_rollout_ref.model.path} to train {names} on it")
            await self.launch()
        else:
            self.serve_from_disk()
        await self._start_servers()
        self.awake = self.workers is None
        # files of a few megabytes, which the servers read at once
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self.folder = tempfile.TemporaryDirectory(prefix="verl-dag-adapters-", dir=parent, ignore_cleanup_errors=True)

    def _worker(self) -> tuple[type, dict[str, Any]]:
        from recipe.dag.policy.adapter_worker import AdapterWorker

        return AdapterWorker, {"role": "actor_rollout", "adapters": self.adapters}

    def serve(self, name: str, version: int, folder: Path) -> list[Any]:
        """Let all servers load an adapter from a PEFT folder that their machines see, awake or asleep. Return what is
        to be awaited."""
        servers: list[Any] = [replica.server_handle for replica in self.replicas]
        return [server.load_adapter.remote(name, version, str(folder)) for server in servers]

    async def wake(self, version: int) -> bool:
        """Wake the servers. Return whether they slept."""
        async with self.collective:
            if self.awake:
                return False
            with self.timed("wake"):
                await asyncio.to_thread(run_sync, self.sync, version)
            self.awake = True
            return True

    async def sleep(self) -> None:
        if self.awake and self.workers is not None:
            self.awake = False
            await self.sync.sleep_replicas()


class AdapterPolicy(PolicyRuntime):
    """An adapter on a host that has been started."""

    def __init__(
        self,
        name: str,
        config: DictConfig,
        host: AdapterHost,
        *,
        trained: bool,
        reference: Reference | None,
        critic: bool,
        start: str | None,
    ):
        """`start`: the PEFT folder of an adapter that is not trained; None: it is the base."""
        super().__init__(name, config, host.pool, trained=trained, reference=reference, critic=critic)
        self.host, self.from_folder = host, start
        self.sent = -1
        """The version that the servers load, or have loaded."""
        self.loading: list[Any] = []
        """What is to be awaited of them."""
        self.processes = host

    @property
    def has_workers(self) -> bool:
        return False  # they are the host's

    async def start(self) -> None:
        if self.trained:
            self.workers = AdapterWorkers(
                self.host.workers,
                self.name,
                self.config.critic,
                updated=lambda: self.send_weights(self.version + 1),
            )
            self.canary = await self.host.canary_of(self.name, self.workers, adapter=self.name)
        elif self.from_folder is not None:
            await asyncio.gather(*self.host.serve(self.name, 0, Path(self.from_folder)))
        served = self.trained or self.from_folder is not None
        self.adapter = self.name if served else None
        self.replicas, self.endpoint = self.host.replicas, self.host.endpoint_of(self.name, adapter=self.adapter)

    def kill(self) -> None:
        """Do nothing: the host ends its processes."""

    def send_weights(self, version: int) -> None:
        """Write the trainer's weights for the servers, which begin to load them as `version`."""
        root = Path(self.host.folder.name)
        folder = root / f"{self.name}@{version}"
        # servers may still unload the last version, and have had a step's time for those before it
        kept = {str(folder), str(root / f"{self.name}@{self.version}")}
        stale = [str(old) for old in root.glob(f"{self.name}@*") if str(old) not in kept]
        with self.timed("write"):
            self.host.workers.write_adapter(self.name, str(folder), stale)
        self.sent, self.loading = version, self.host.serve(self.name, version, folder)

    async def sync_weights(self, version: int) -> None:
        if self.sent != version:  # no update of this step has sent it
            async with self.host.collective:
                await asyncio.to_thread(self.send_weights, version)
        slept, _ = await asyncio.gather(self.host.wake(version), self._load())
        self.version = version
        checked = [self, self.host] if slept else [self]  # the base, too, which has one version
        await asyncio.gather(*[policy._check_canary(policy.version) for policy in checked])

    async def _load(self) -> None:
        with self.timed("load"):
            await asyncio.gather(*self.loading)

    async def sleep(self) -> None:
        await self.host.sleep()

    def save(self, folder: Path, step: int) -> None:
        self.workers.save_adapter(self.name, str(folder / "actor"))
        if self.critic:
            self.workers.save_adapter(critic_of(self.name), str(folder / "critic"))

    def saved(self) -> list[Saved]:
        return [*adapters_saved(self.name, self.workers.world_size, critic=self.critic)]

    def _restore(self, folder: Path) -> None:
        self.workers.load_adapter(self.name, str(folder / "actor"))
        if self.critic:
            self.workers.load_adapter(critic_of(self.name), str(folder / "critic"))


class AdapterWorkers:
    """The workers of a host, whose passes compute with one policy's adapters."""

    def __init__(self, workers: Any, adapter: str, critic: DictConfig, *, updated: Callable[[], None] = lambda: None):
        """`critic`: verl's configuration, with the sizes of the critic's micro-batches. `updated`: called after the
        last update of the actor in a step."""
        self._workers, self._adapter, self._critic, self._updated = workers, adapter, critic, updated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def compute_log_prob(self, data: TensorDict) -> Any:
        return self._workers.compute_log_prob(self._named(data))

    def compute_ref_log_prob(self, data: TensorDict) -> Any:
        return self._workers.compute_ref_log_prob(self._named(data))

    def update_actor(self, data: TensorDict) -> Any:
        more_follow = tu.get_non_tensor_data(data, "more_follow", default=False)
        output = self._workers.update_actor(self._named(data))
        if not more_follow:
            self._updated()
        return output

    def compute_values(self, data: TensorDict) -> Any:
        return self._workers.compute_values(self._named_critic(data))

    def update_critic(self, data: TensorDict) -> Any:
        return self._workers.update_critic(self._named_critic(data))

    def score_canary(self, prompt: list[int]) -> Any:
        return self._workers.score_canary(prompt, self._adapter)

    def _named(self, data: TensorDict) -> TensorDict:
        tu.assign_non_tensor(data, adapter=self._adapter)
        return data

    def _named_critic(self, data: TensorDict) -> TensorDict:
        tu.assign_non_tensor(
            data,
            adapter=critic_of(self._adapter),
            use_dynamic_bsz=self._critic.use_dynamic_bsz,
            max_token_len_per_gpu=self._critic.ppo_max_token_len_per_gpu,
            micro_batch_size_per_gpu=self._critic.ppo_micro_batch_size_per_gpu,
        )
        return data
