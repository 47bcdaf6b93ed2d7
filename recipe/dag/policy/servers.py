"""A policy's inference servers, and the client through which agents meet them.

Invariant: verl's LLMServerManager launches the replicas; the replica class differs only in the policy's name suffix. A
generation is one RPC: the balancer is verl's, but in this process. Whatever a server does wrong reaches the runner as a
ModelServerFault.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from verl.single_controller.ray.base import split_resource_pool
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.dag.episode.record import Generation
from recipe.dag.errors import ModelServerFault, boundary


def _load_cpu_replica():
    from recipe.dag.platform.rollout import CPUReplica

    return CPUReplica


RolloutReplicaRegistry.register("cpu", _load_cpu_replica)


class PolicyServerManager(LLMServerManager):
    """Hybrid replicas on `worker_group`, or replicas that load their weights from disk on `frozen_pool`."""

    def __init__(self, config: DictConfig, policy: str, *, worker_group=None, frozen_pool=None):
        self.frozen_pool = frozen_pool
        replica = RolloutReplicaRegistry.get(config.actor_rollout_ref.rollout.name)
        self.rollout_replica_class = functools.partial(replica, name_suffix=policy)
        super().__init__(config, worker_group=worker_group)

    async def _initialize_llm_servers(self, start_rank: int | None = None) -> None:
        if self.worker_group is not None:
            return await super()._initialize_llm_servers(start_rank)
        rollout = self.rollout_config
        replicas = max(1, self.frozen_pool.world_size // rollout.tensor_model_parallel_size) if self.frozen_pool else 1
        self.rollout_replicas = [
            self.rollout_replica_class(
                replica_rank=rank,
                config=rollout,
                model_config=self.model_config,
                gpus_per_node=rollout.n_gpus_per_node,
                is_teacher_model=True,  # verl's word for "never synced": it only changes the server's name
            )
            for rank in range(replicas)
        ]
        if self.frozen_pool is not None:
            shares = split_resource_pool(self.frozen_pool, split_size=self.frozen_pool.world_size // replicas)
            for replica, share in zip(self.rollout_replicas, shares, strict=True):
                await replica.init_colocated(share)
        else:
            for replica in self.rollout_replicas:
                await replica.init_standalone()
        self.server_handles = [replica.server_handle for replica in self.rollout_replicas]
        self.server_addresses = [replica.server_address for replica in self.rollout_replicas]

    async def _init_global_load_balancer(self) -> None:
        if (
            getattr(self.rollout_config, "router_config_path", None) is not None
        ):  # a router of the user's, which is verl's to start
            return await super()._init_global_load_balancer()
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        deterministic = bool(getattr(self.rollout_config, "full_determinism", False))
        self.global_load_balancer = LocalBalancer(servers, full_determinism=deterministic)

    def get_client(self, client_cls: type[LLMServerClient] | None = None, **kwargs: Any) -> LLMServerClient:
        if client_cls is None and isinstance(self.global_load_balancer, LocalBalancer):
            client_cls = DirectClient
        return super().get_client(client_cls, **kwargs)


class LocalBalancer(GlobalRequestLoadBalancer):
    """verl's balancer in this process: one process makes all requests, and an actor would cost two RPCs for each. Of
    servers with equal load it takes the first, where verl draws from the process's random numbers."""

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        if request_id not in self._request_id_to_server and not self._full_determinism and self._inflight_requests:
            self._request_id_to_server[request_id] = min(self._inflight_requests, key=self._inflight_requests.get)
        return super().acquire_server(request_id)


class DirectClient(LLMServerClient):
    """verl's client over a LocalBalancer. What it reads of the configuration for every request is read once: a look-up
    of OmegaConf's takes 0.1 ms."""

    def __init__(self, config: DictConfig, load_balancer_handle: LocalBalancer, **kwargs: Any):
        rollout = config.actor_rollout_ref.rollout
        settings = SimpleNamespace(name=rollout.name, full_determinism=getattr(rollout, "full_determinism", False))
        plain = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=settings))
        super().__init__(plain, load_balancer_handle, **kwargs)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return self._load_balancer.acquire_server(request_id)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._load_balancer.release_server(server_id)


class ServerClient:
    """GenerationClient over verl's load-balanced client."""

    def __init__(self, client: LLMServerClient, policy: str, *, seeded: bool):
        self.client, self.policy = client, policy
        self.seeded = seeded
        """Whether the server takes a seed per request; SGLang does so only in its deterministic mode."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        params = {key: value for key, value in sampling.items() if key != "seed" or self.seeded}
        with boundary(ModelServerFault, where=self.policy):
            output = await self.client.generate(
                request_id, prompt_ids=prompt_ids, sampling_params={**params, "logprobs": True}
            )
            ids, log_probs = list(output.token_ids), list(output.log_probs or [])
        reason = {"aborted": "abort", "completed": "stop", None: "stop"}.get(output.stop_reason, output.stop_reason)
        if reason == "abort" or len(ids) != len(log_probs) or not all(map(math.isfinite, log_probs)):
            raise ModelServerFault(
                f"unusable answer: {len(ids)} ids, {len(log_probs)} log-probs, {reason}", where=self.policy
            )
        if len(ids) >= params["max_tokens"] and reason == "stop" and params.get("ignore_eos"):
            reason = "length"
        return Generation(ids, log_probs, reason, int(output.extra_fields.get("global_steps") or 0))
