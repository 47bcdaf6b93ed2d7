"""Training steps of policies without a model: the kernels are replaced by the test."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from recipe.dag.policy.placement import Pool
from recipe.dag.train.step import TrainingStep


def policies_of(*names: str, shared_pool: bool = True, **fields) -> dict[str, SimpleNamespace]:
    pool = Pool(None, len(names))
    pools = {name: pool if shared_pool else Pool(None, 1) for name in names}
    return {
        name: SimpleNamespace(name=name, pool=pools[name], processes=processes_of(name), **fields) for name in names
    }


def processes_of(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, workers=SimpleNamespace(free_cache=lambda: None))


def run_step(workflow, rows, *names: str, shared_pool: bool = True, seed: int = 0, **options) -> TrainingStep:
    """Run a step of the policies of these names, `a` and `b` without any."""
    policies = policies_of(*(names or "ab"), shared_pool=shared_pool)
    step = TrainingStep(workflow, policies, rows, seed=seed, **options)
    asyncio.run(step.run())
    return step
