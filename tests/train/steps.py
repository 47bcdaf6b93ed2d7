"""Training steps of policies without a model: the kernels are replaced by the test."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from recipe.dag.train.step import TrainingStep


def policies_of(*names: str, shared_pool: bool = True, **fields) -> dict[str, SimpleNamespace]:
    pool = SimpleNamespace(lock=asyncio.Lock())
    pools = {name: pool if shared_pool else SimpleNamespace(lock=asyncio.Lock()) for name in names}
    return {name: SimpleNamespace(name=name, pool=pools[name], **fields) for name in names}


def run_step(workflow, rows, *names: str, shared_pool: bool = True, seed: int = 0, **options) -> TrainingStep:
    """Run a step of the policies of these names, `a` and `b` without any."""
    policies = policies_of(*(names or "ab"), shared_pool=shared_pool)
    step = TrainingStep(workflow, policies, rows, seed=seed, **options)
    asyncio.run(step.run())
    return step
