"""Keys of verl's configuration in a run: those that are read, and values that are accepted because they change nothing.

Invariant: a key has an effect if it is listed here, in `recipe.dag.workflow.verl_reads` or in config/dag.yaml; every
other key is refused.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.workflow.verl_keys import REPLACED, RUN
from recipe.dag.workflow.verl_reads import ACTOR, CRITIC, is_listed, keys_of

READ = (
    f"{RUN}.actor.optim.lr",
    f"{RUN}.rollout.n",
    "critic.optim.lr",
    "trainer.resume_from_path",
    "ray_kwargs.ray_init.*",
    *(f"{RUN}.{key}" for key in keys_of(ACTOR)),
    # what only a critic's own `config` may set is in REPLACED: in a run, the actor's applies to critics
    *(name for key in keys_of(CRITIC) if (name := f"critic.{key}").removesuffix(".*") not in REPLACED),
)
"""Keys that verl or this project reads without config/dag.yaml setting them."""

SAME: dict[str, Any] = {
    f"{RUN}.hybrid_engine": True,
    f"{RUN}.rollout.name": "sglang",
    f"{RUN}.rollout.mode": "async",
    f"{RUN}.rollout.calculate_log_probs": True,
    f"{RUN}.rollout.enable_chunked_prefill": True,
    f"{RUN}.rollout.enable_prefix_caching": True,
    f"{RUN}.rollout.pipeline_model_parallel_size": 1,
    f"{RUN}.ref.fsdp_config.param_offload": True,
    f"{RUN}.model.lora_rank": 0,
    "critic.model.lora_rank": 0,
    "data.shuffle": True,
    "data.validation_shuffle": False,
    "data.return_raw_chat": True,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "trainer.balance_batch": True,
    "trainer.val_only": False,
    "reward_model.enable": False,
    "reward.reward_model.enable": False,
    "distillation.enabled": False,
    "global_profiler.tool": None,
    "transfer_queue.enable": False,
    "model_engine": "dp",
}
"""Refused keys -> the value that describes what happens anyway, which is accepted."""

NO_EFFECT = {"default_agent.micro_rollout_batch_size": "the server batches what is in flight"}
"""Keys of predecessors, accepted so that their command lines work -> the reason why the key is not needed."""


def says_the_same(key: str, value: Any) -> bool:
    """Return whether a refused key has the value that describes what happens anyway."""
    return key in SAME and type(value) is type(SAME[key]) and value == SAME[key]


def is_read(key: str) -> bool:
    """Return whether verl reads this key of its configuration, or this project reads it without config/dag.yaml setting
    it."""
    return is_listed(key, READ)
