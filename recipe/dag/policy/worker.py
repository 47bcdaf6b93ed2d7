"""verl's actor/rollout/reference worker, told about this package's engines and rollouts.

Invariant: importing this module in a worker process registers what that process needs: the FSDP2 engine for the CPU,
the CPU rollout adapter, and an SGLang adapter that finds the server of its own policy. Nothing in verl is replaced.
"""

from __future__ import annotations

import verl.workers.rollout.base as rollout_base
from torch.distributed import init_process_group, is_initialized
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker

rollout_base._ROLLOUT_REGISTRY[("cpu", "async")] = "recipe.dag.platform.rollout.CPUServerAdapter"
rollout_base._ROLLOUT_REGISTRY[("sglang", "async")] = "recipe.dag.policy.sglang.PolicyServerAdapter"


def register_cpu_engine() -> None:
    import verl.workers.engine.fsdp.transformer_impl as fsdp

    EngineRegistry.register("language_model", ["fsdp2"], "cpu")(fsdp.FSDPEngineWithLMHead)
    # pinned memory needs an accelerator, and a forward-only engine asks for it through this name
    fsdp.CPUOffloadPolicy = lambda **kwargs: None


class PolicyWorker(ActorRolloutRefWorker):
    """One rank of one policy."""

    def __init__(self, config, role: str, **kwargs):
        super().__init__(config=config, role=role, **kwargs)
        if get_device_name() == "cpu":
            register_cpu_engine()
            if not is_initialized():  # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses
                init_process_group("gloo", rank=self.rank, world_size=self.world_size)
