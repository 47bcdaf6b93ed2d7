"""A policy's inference servers, and the client through which agents generate.

Invariant: verl's LLMServerManager launches the replicas; the replica class differs only in the policy's name suffix. A
generation is one RPC: the load balancer is verl's, but in this process. Every server error reaches the runner as a
ModelServerFault.
"""

from __future__ import annotations

import functools
import math
import threading
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from verl.single_controller.ray.base import split_resource_pool
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.dag.core.errors import ModelServerFault, boundary
from recipe.dag.types.record import Generation


def _load_cpu_replica():
    from recipe.dag.platform.rollout import CPUReplica

    return CPUReplica


RolloutReplicaRegistry.register("cpu", _load_cpu_replica)
_LOADING = threading.Lock()


def replica_class(name: str) -> type[RolloutReplica]:
    """Return the replica class of an inference server, whose import takes seconds. Any thread may call it."""
    with _LOADING:  # verl's import of SGLang sets and deletes an environment variable
        stock = RolloutReplicaRegistry.get(name)
    if name != "sglang":
        return stock
    from recipe.dag.policy.sglang_server import PolicyReplica

    return PolicyReplica


class PolicyServerManager(LLMServerManager):
    """Manages hybrid replicas on `worker_group`, or replicas on `frozen_pool` that load their weights from disk."""

    def __init__(self, config: DictConfig, policy: str, *, worker_group=None, frozen_pool=None):
        self.frozen_pool = frozen_pool
        replica = replica_class(config.actor_rollout_ref.rollout.name)
        # before verl's __init__, which keeps a class that is already there
        self.rollout_replica_class = functools.partial(replica, name_suffix=policy)
        super().__init__(config, worker_group=worker_group)  # pyright: ignore[reportArgumentType]  # verl takes None

    async def _initialize_llm_servers(self, start_rank: int | None = None) -> None:
        if self.worker_group is not None:
            return await super()._initialize_llm_servers(start_rank)  # pyright: ignore[reportArgumentType]  # as above
        rollout = self.rollout_config
        replicas = max(1, self.frozen_pool.world_size // rollout.tensor_model_parallel_size) if self.frozen_pool else 1
        self.rollout_replicas = [
            self.rollout_replica_class(
                replica_rank=rank,
                config=rollout,
                model_config=self.model_config,
                gpus_per_node=rollout.n_gpus_per_node,
                is_teacher_model=True,  # verl's name for servers that are never synced; only changes their name
            )
            for rank in range(replicas)
        ]
        if self.frozen_pool is not None:
            subpools = split_resource_pool(self.frozen_pool, split_size=self.frozen_pool.world_size // replicas)
            for replica, subpool in zip(self.rollout_replicas, subpools, strict=True):
                await replica.init_colocated(subpool)
        else:
            for replica in self.rollout_replicas:
                await replica.init_standalone()
        self.server_handles = [replica.server_handle for replica in self.rollout_replicas]
        self.server_addresses = [replica.server_address for replica in self.rollout_replicas]

    async def _init_global_load_balancer(self) -> None:
        if (
            getattr(self.rollout_config, "router_config_path", None) is not None
        ):  # the user's own router: verl starts it
            return await super()._init_global_load_balancer()
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        deterministic = bool(getattr(self.rollout_config, "full_determinism", False))
        self.global_load_balancer = LocalBalancer(servers, full_determinism=deterministic)

    def get_client(self, client_cls: type[LLMServerClient] | None = None, **kwargs: Any) -> LLMServerClient:
        if client_cls is None and isinstance(self.global_load_balancer, LocalBalancer):
            client_cls = DirectClient
        return super().get_client(client_cls, **kwargs)


class LocalBalancer(GlobalRequestLoadBalancer):
    """verl's load balancer in this process: one process makes all requests, and an actor would add two RPCs to each.

    Among servers with equal load it takes the first; verl draws one from the process's random numbers.
    """

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        in_flight = self._inflight_requests
        # full determinism has its own rule in verl, and a known request goes back to the server that cached its prefix
        if request_id not in self._request_id_to_server and not self._full_determinism and in_flight:
            self._request_id_to_server[request_id] = min(in_flight, key=lambda server: in_flight[server])
        return super().acquire_server(request_id)


class DirectClient(LLMServerClient):
    """verl's client over a LocalBalancer. Settings that verl reads for every request are copied once: an OmegaConf
    lookup takes 0.1 ms."""

    def __init__(self, config: DictConfig, load_balancer_handle: LocalBalancer, **kwargs: Any):
        rollout = config.actor_rollout_ref.rollout
        settings = SimpleNamespace(name=rollout.name, full_determinism=getattr(rollout, "full_determinism", False))
        plain = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=settings))
        super().__init__(plain, load_balancer_handle, **kwargs)  # pyright: ignore[reportArgumentType]  # same keys

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return self._load_balancer.acquire_server(request_id)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._load_balancer.release_server(server_id)


class ServerClient:
    """A GenerationClient over verl's load-balanced client."""

    def __init__(self, client: LLMServerClient, policy: str, *, seeded: bool, adapter: str | None = None):
        self.client, self.policy = client, policy
        self.extra: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        """Arguments of the server's `generate` besides verl's."""
        self.seeded = seeded
        """True if the server takes a seed per request; SGLang does so only in its deterministic mode."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        params = {key: value for key, value in sampling.items() if key != "seed" or self.seeded}
        with boundary(ModelServerFault, where=self.policy):
            output = await self.client.generate(
                request_id, prompt_ids=prompt_ids, sampling_params={**params, "logprobs": True}, **self.extra
            )
            ids, log_probs = list(output.token_ids), list(output.log_probs or [])
        stop_reason = "stop" if output.stop_reason is None else output.stop_reason
        reason = {"aborted": "abort", "completed": "stop"}.get(stop_reason, stop_reason)
        if reason == "abort" or len(ids) != len(log_probs) or not all(map(math.isfinite, log_probs)):
            raise ModelServerFault(
                f"invalid response: {len(ids)} ids, {len(log_probs)} log-probs, {reason}", where=self.policy
            )
        # without an end token, the server's "stop" at the limit means that the response was cut off
        if len(ids) >= params["max_tokens"] and reason == "stop" and params.get("ignore_eos"):
            reason = "length"
        # verl's name of the version of the weights; servers that are never synced have none
        version, cached = (output.extra_fields.get(name) for name in ("global_steps", "cached_tokens"))
        return Generation(ids, log_probs, reason, int(version or 0), cached_tokens=cached)
