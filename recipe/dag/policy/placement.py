"""Which policy runs on which devices.

Invariant: policies in one pool share its devices and take turns (the pool's lock); policies in different pools may run
at the same time. Pure but for `create`, which reserves the devices with Ray.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow


@dataclass(frozen=True, slots=True)
class Share:
    """The devices of one pool and the policies on it."""

    processes_on_nodes: tuple[int, ...]
    policies: tuple[str, ...]

    def slots(self, platform: str) -> int:
        """Return how many CPUs Ray reserves beside each device, and into how many parts it cuts a GPU."""
        # a policy is at most a trainer and, frozen, a placeholder for its server; each takes a part of a GPU. Without
        # GPUs nothing is cut, and an actor holds a CPU only while Ray places it.
        return 1 if platform == "cpu" else 2 * len(self.policies) + 1

    def groups(self, platform: str) -> tuple[int, ...]:
        """Return the number of processes that Ray places together on one node, for each such group."""
        return (1,) if platform == "cpu" else self.processes_on_nodes


def plan_pools(workflow: Workflow, *, nnodes: int, n_gpus_per_node: int) -> tuple[Share, ...]:
    """Policies with `gpus` get a pool of their own; the others share what is left."""
    own = {name: policy.gpus for name, policy in workflow.policies.items() if policy.gpus}
    shared = tuple(name for name in workflow.policies if name not in own)
    total, taken = nnodes * n_gpus_per_node, sum(own.values())
    if nnodes > 1 and own:
        raise UserError("policies.*.gpus: policies with GPUs of their own need a run on one node (trainer.nnodes=1)")
    if taken > total or (shared and taken >= total):
        needed = taken + (1 if shared else 0)
        raise UserError(
            f"the policies ask for {needed} GPUs at least and the run has {total}: lower policies.*.gpus, "
            "or raise trainer.n_gpus_per_node"
        )
    pools = [Share((gpus,), (name,)) for name, gpus in own.items()]
    if shared:
        pools.append(Share((n_gpus_per_node,) * nnodes if not own else (total - taken,), shared))
    return tuple(pools)


@dataclass(slots=True)
class Pool:
    resources: Any
    """verl's RayResourcePool, or None where nothing is reserved (frozen policies on a CPU)."""
    sharing: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def create(share: Share, *, platform: str) -> Pool:
    from verl.single_controller.ray import RayResourcePool

    pool = RayResourcePool(
        list(share.groups(platform)), use_gpu=platform != "cpu", max_colocate_count=share.slots(platform)
    )
    return Pool(pool, len(share.policies))
