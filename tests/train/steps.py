"""Training steps of policies without a model, whose kernels the test replaces, and policies on one worker of verl's."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from types import SimpleNamespace

from verl.utils import tensordict_utils as tu

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


def policy_on(worker, config, *, micro_batch: int, dynamic: int | None = None, **fields) -> SimpleNamespace:
    """A policy whose passes run on `worker`, in micro-batches of as many rows, or of `dynamic` tokens."""
    config, fixed = copy.deepcopy(config), dynamic is None
    config.actor_rollout_ref.actor.use_dynamic_bsz = not fixed
    if fixed:
        config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = micro_batch
    sizes = {
        "use_dynamic_bsz": not fixed,
        "max_token_len_per_gpu": dynamic,
        "micro_batch_size_per_gpu": micro_batch,
    }

    def call(method, data):
        tu.assign_non_tensor(data, **sizes)
        return method(data)

    methods = ("compute_log_prob", "compute_ref_log_prob", "update_actor")
    return SimpleNamespace(
        config=config,
        data_parallel_size=1,
        workers=SimpleNamespace(**{name: partial(call, getattr(worker, name)) for name in methods}),
        tokenizer=SimpleNamespace(pad_token_id=0),
        pool=Pool(None, 1),
        processes=None,
        **fields,
    )


def run_step(workflow, rows, *names: str, shared_pool: bool = True, seed: int = 0, **options) -> TrainingStep:
    """Run a step of the policies of these names, `a` and `b` without any."""
    policies = policies_of(*(names or "ab"), shared_pool=shared_pool)
    step = TrainingStep(workflow, policies, rows, seed=seed, **options)
    asyncio.run(step.run())
    return step
