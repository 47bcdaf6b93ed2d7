"""Placement of policies on devices.

Invariant: policies in one pool share its devices and take turns (the pool's lock); policies in different pools may run
at the same time. Pure, except for `create`, which reserves the devices with Ray.
"""

from __future__ import annotations

import asyncio
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


def create(spec: PoolSpec, *, platform: str) -> Pool:
    """Reserve the devices of a pool with Ray."""
    from verl.single_controller.ray import RayResourcePool

    # a process takes 1 / max_colocate_count of its GPU, and each rank's bundle has max_colocate_count CPUs
    pool = RayResourcePool(
        list(spec.groups(platform)), use_gpu=platform != "cpu", max_colocate_count=spec.slots(platform)
    )
    return Pool(pool, len(spec.policies))
