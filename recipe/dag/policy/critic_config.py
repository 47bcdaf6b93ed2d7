"""The critic's part of a policy's verl configuration.

Invariant: a critic runs in its policy's processes, so it uses the actor's tokenizer, sharding and kind of
micro-batches (by rows or by tokens) unless `critic.config` overrides them; it has its own optimizer.
"""

from __future__ import annotations

from omegaconf import DictConfig, open_dict

from recipe.dag.core.errors import UserError
from recipe.dag.policy.overrides import apply_overrides
from recipe.dag.workflow.agent_schema import Critic

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
SHARED_WITH_ACTOR = (
    "external_lib",
    "override_config",
    "enable_gradient_checkpointing",
    "use_remove_padding",
    "use_liger",
)
"""Model keys that a critic copies from its actor."""


def apply_critic(config: DictConfig, run: DictConfig, name: str, critic: Critic, *, model_path: str, cpu: bool) -> None:
    """Complete `config.critic` of policy `name`, whose actor is already configured.

    Raises UserError for a key that verl does not know, and for a token limit per micro-batch below the longest row.
    """
    actor, model, node = config.actor_rollout_ref.actor, config.actor_rollout_ref.model, config.critic
    with open_dict(node):
        node.enable = True
        node.model.path = model_path
        # a critic reads the policy's token ids, whatever model it starts from
        node.model.tokenizer_path = model.tokenizer_path or model.path
        node.model.trust_remote_code = (critic.model or model).trust_remote_code
        for key in SHARED_WITH_ACTOR:
            node.model[key] = model[key]
        node.strategy = actor.strategy
        node.use_dynamic_bsz = actor.use_dynamic_bsz
        node.cliprange_value = critic.cliprange_value
        node.ppo_epochs = critic.epochs
        node.fsdp.seed = node.data_loader_seed = run.seed
        # all steps: critics learn also while their policy's actor waits for others (`train_cycle`)
        node.optim.total_training_steps = run.trainer.total_training_steps
        if node.ppo_micro_batch_size_per_gpu is None:
            node.ppo_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
        if critic.lr is not None:
            node.optim.lr = critic.lr
    # after what it shares with the actor: `critic.config` wins
    apply_overrides(config, run, "critic", critic.config, where=f"policies.{name}.critic.config")
    if cpu:
        with open_dict(node):
            node.fsdp.mixed_precision = FP32
            node.fsdp.use_torch_compile = False
    check_longest_row("critic", node, config.actor_rollout_ref.rollout.max_model_len)


def check_longest_row(key: str, node: DictConfig, longest: int) -> None:
    """Raise UserError if a micro-batch of the actor or the critic has no room for a row of `longest` tokens."""
    tokens = node.ppo_max_token_len_per_gpu
    if node.use_dynamic_bsz and tokens < longest:
        raise UserError(
            f"{key}.ppo_max_token_len_per_gpu={tokens} is below the longest row, {longest} tokens "
            "(data.max_prompt_length + data.max_response_length): raise it"
        )
