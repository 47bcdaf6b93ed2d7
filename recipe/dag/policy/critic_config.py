"""The critic's part of a policy's verl configuration.

Invariant: a critic runs in its policy's processes, so what those depend on (tokenizer, sharding, micro-batches by rows
or by tokens) is the actor's unless `critic.config` says otherwise; its optimizer is its own.
"""

from __future__ import annotations

from omegaconf import DictConfig, open_dict

from recipe.dag.errors import UserError
from recipe.dag.policy.overrides import apply_overrides
from recipe.dag.workflow.schema import Critic

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
LIKE_THE_ACTORS = (
    "external_lib",
    "override_config",
    "enable_gradient_checkpointing",
    "use_remove_padding",
    "use_liger",
)
"""Keys of the model that a critic takes over."""


def apply_critic(config: DictConfig, run: DictConfig, name: str, critic: Critic, *, model_path: str, cpu: bool) -> None:
    """Complete `config.critic` of policy `name`, whose actor is configured. Raises UserError for a key that verl does
    not know, and for micro-batches by tokens that cannot hold the longest row."""
    actor, model, node = config.actor_rollout_ref.actor, config.actor_rollout_ref.model, config.critic
    with open_dict(node):
        node.enable = True
        node.model.path = model_path
        node.model.tokenizer_path = model.tokenizer_path or model.path
        node.model.trust_remote_code = (critic.model or model).trust_remote_code
        for key in LIKE_THE_ACTORS:
            node.model[key] = model[key]
        node.strategy = actor.strategy
        node.use_dynamic_bsz = actor.use_dynamic_bsz
        node.cliprange_value = critic.cliprange_value
        node.ppo_epochs = critic.epochs
        node.fsdp.seed = node.data_loader_seed = run.seed
        node.optim.total_training_steps = run.trainer.total_training_steps
        if node.ppo_micro_batch_size_per_gpu is None:
            node.ppo_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
        if critic.lr is not None:
            node.optim.lr = critic.lr
    apply_overrides(config, run, "critic", critic.config, where=f"policies.{name}.critic.config")
    if cpu:
        with open_dict(node):
            node.fsdp.mixed_precision = FP32
            node.fsdp.use_torch_compile = False
    longest = config.actor_rollout_ref.rollout.max_model_len
    if node.use_dynamic_bsz and node.ppo_max_token_len_per_gpu < longest:
        raise UserError(
            f"critic.ppo_max_token_len_per_gpu={node.ppo_max_token_len_per_gpu} is below the longest row, {longest} "
            "tokens (data.max_prompt_length + data.max_response_length): raise it"
        )
