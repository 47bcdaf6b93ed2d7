"""Placement of policies on devices.

Invariant: policies in one pool share its devices and take turns (the pool's lock), and those whose turn it is not keep
no memory in torch's cache; policies in different pools may run at the same time. Pure, except for `create`, which
reserves the devices with Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.settings.pools import PoolSpec


@dataclass(slots=True)
class Pool:
    """The reserved devices of one pool."""

    resources: Any
    """verl's RayResourcePool, or None if nothing is reserved (frozen policies on a CPU)."""
    sharing: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last: Any = None
    """The processes (PolicyRuntime.processes) that had the last turn."""

    @asynccontextmanager
    async def turn(self, processes: Any) -> AsyncIterator[None]:
        """Hold the devices for these processes. Those that held them before empty torch's cache first, which may be
        tens of GB of freed activations that no other process can use."""
        async with self.lock:
            before, self.last = self.last, processes
            if before is not None and before is not processes:
                await asyncio.to_thread(before.workers.free_cache)
            yield


def create(spec: PoolSpec, *, platform: str) -> Pool:
    """Reserve the devices of a pool with Ray."""
    from verl.single_controller.ray import RayResourcePool

    # a process takes 1 / max_colocate_count of its GPU, and each rank's bundle has max_colocate_count CPUs
    pool = RayResourcePool(
        list(spec.groups(platform)), use_gpu=platform != "cpu", max_colocate_count=spec.slots(platform)
    )
    return Pool(pool, len(spec.policies))
