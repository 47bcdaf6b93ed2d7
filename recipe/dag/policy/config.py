"""One complete verl configuration per policy.

Invariant: every verl object gets its own configuration (verl mutates them in place), made from the run's, the
workflow's algorithm, the policy's overrides and, last, the platform's requirements. A key that verl does not know is a
UserError that names the policy.
"""

from __future__ import annotations

import pickle
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import AutoConfig

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.core.errors import UserError
from recipe.dag.policy.attention import FLASH, PACKAGES, PADDED, VARLEN, missing_attention
from recipe.dag.policy.critic_config import FP32, apply_critic, check_longest_row
from recipe.dag.policy.overrides import apply_overrides
from recipe.dag.settings.absolute import absolute_if_local, make_absolute
from recipe.dag.settings.defaults import (
    default_tokens,
    liger_is_installed,
    longest_row,
    served_length,
    uses_liger,
)
from recipe.dag.workflow.agent_schema import Policy
from recipe.dag.workflow.schema import Workflow

CPU_CONFIG = {
    "model": {"enable_gradient_checkpointing": False},
    "actor": {
        "use_torch_compile": False,
        "fsdp_config": {"use_torch_compile": False, "param_offload": False, "optimizer_offload": False},
    },
    "ref": {"fsdp_config": {"use_torch_compile": False}},
    "rollout": {"name": "cpu", "tensor_model_parallel_size": 1, "free_cache_engine": False, "dtype": "float32"},
}


def policy_config(
    run: DictConfig,
    workflow: Workflow,
    name: str,
    *,
    model_path: str,
    critic_path: str | None = None,
    processes: int = 1,
    sharing: int = 1,
    offload_between_turns: bool = False,
    updates: int,
    platform: str,
) -> DictConfig:
    """Return the complete verl configuration of policy `name`.

    critic_path: model of the critic that runs in the policy's processes, if it has one
    processes: the policy's, one per GPU
    sharing: number of policies that share the policy's GPUs, and so the memory for inference servers
    offload_between_turns: trained models leave the GPU while other policies use it, unless the configuration sets this
    updates: number of the run's steps in which the actor is updated
    """
    policy = workflow.policies[name]
    config: DictConfig = pickle.loads(pickle.dumps(run))  # copy.deepcopy takes three times as long
    node = config.actor_rollout_ref
    with open_dict(node):
        node.model.path = model_path
        node.model.tokenizer_path = absolute_if_local(policy.model.tokenizer_path)
        node.model.trust_remote_code = policy.model.trust_remote_code
        # a fraction of the whole GPU, on which all servers of the pool are awake during an episode
        node.rollout.gpu_memory_utilization = node.rollout.gpu_memory_utilization / sharing
        node.rollout.max_model_len = longest_row(run)
        node.rollout.max_num_seqs = max(int(node.rollout.max_num_seqs), 1)
        if has_stop_strings(workflow, name):  # SGLang's scheduler decodes tokens to find them
            node.rollout.skip_tokenizer_init = False
    _apply_algorithm(node.actor, workflow.algorithm, policy, run)
    # after the algorithm: the policy's own `config` wins
    where = f"policies.{workflow.base_of(name)}.config"
    apply_overrides(config, run, "actor_rollout_ref", policy.config, where=where)
    with open_dict(config):
        # verl's place for data of plugins: worker and server adapter read the policy's name here
        node.rollout.custom = {"policy": name}
        _apply_platform(config, platform)
        # again, since the platform's settings may have been merged into a copy
        node = config.actor_rollout_ref
        # verl asserts that they are equal
        node.rollout.log_prob_use_dynamic_bsz = node.ref.log_prob_use_dynamic_bsz = node.actor.use_dynamic_bsz
        if not node.actor.use_dynamic_bsz:  # one size for every pass, so that one layout of the rows fits all of them
            node.rollout.log_prob_micro_batch_size_per_gpu = node.actor.ppo_micro_batch_size_per_gpu
            node.ref.log_prob_micro_batch_size_per_gpu = node.actor.ppo_micro_batch_size_per_gpu
        _apply_sequence_parallel(config, policy, name, model_path, processes)
        # verl advances the learning rate once per update, and an actor may wait for steps (`train_cycle`)
        node.actor.optim.total_training_steps = max(updates, 1)
        if node.actor.ppo_max_token_len_per_gpu is None:
            node.actor.ppo_max_token_len_per_gpu = default_tokens(node.rollout.max_model_len)
    if policy.frozen:
        with open_dict(node.rollout):
            node.rollout.max_model_len = served_length(run, workflow, name)
    else:
        check_longest_row("actor_rollout_ref.actor", node.actor, node.rollout.max_model_len)
    learners = [("actor_rollout_ref.model", "actor_rollout_ref.actor.optim")]
    if critic_path is not None:
        assert policy.critic is not None  # only policies that declare a critic have a critic model
        apply_critic(config, run, name, policy.critic, model_path=critic_path, cpu=platform == "cpu")
        learners.append(("critic.model", "critic.optim"))
    for model, optim in learners:
        check_kernels(OmegaConf.select(config, model), model, f"policy {name}: ")
        check_optimizer(OmegaConf.select(config, optim), optim, f"policy {name}: ")
        check_schedule(OmegaConf.select(config, optim), run, optim, f"policy {name}: ")
    with open_dict(config):
        make_absolute(config)
        for engine in (config.actor_rollout_ref.actor.fsdp_config, config.critic.fsdp):
            _apply_offload(engine, between_turns=offload_between_turns and platform != "cpu")
            reduce_gradients_once(engine, fits=processes == 1)
    return config


def reduce_gradients_once(engine: DictConfig, *, fits: bool) -> None:
    """Set verl's `use_no_sync_for_gradient_accumulation` of an engine, if it is null. `fits`: each GPU has room for
    whole gradients until the last micro-batch; a single process has them anyway."""
    if engine.use_no_sync_for_gradient_accumulation is None:
        # FSDP2's offloading keeps gradients in host memory
        engine.use_no_sync_for_gradient_accumulation = fits and not engine.offload_policy


def check_kernels(model: DictConfig, key: str, where: str = "") -> None:
    """Raise UserError if a package of the attention or of other kernels is missing: transformers would look for those
    of its attention on the hub. `key`: that of `model` in the configuration."""
    implementation = model.override_config.get("attn_implementation", FLASH)
    setting = f"{where}{key}.override_config.attn_implementation={implementation}"
    if reason := missing_attention(implementation):
        raise UserError(f"{setting}, but {reason}; install it, or set {PADDED}")
    if model.use_liger and not liger_is_installed():
        raise UserError(
            f"{where}{key}.use_liger=true, but liger-kernel is not installed; install it, or leave this out"
        )
    if implementation == VARLEN and not model.use_remove_padding:
        raise UserError(f"{setting} needs packed rows: set {key}.use_remove_padding=true, or set {PADDED}")


def check_optimizer(optim: DictConfig, key: str, where: str = "") -> None:
    """Raise UserError if the package of an optimizer is missing, or torch is asked for one in 8 bits. `key`: that of
    `optim` in the configuration."""
    package = optim.optimizer_impl.partition(".")[0]
    if find_spec(package) is None:
        setting = f"{where}{key}.optimizer_impl={optim.optimizer_impl}"
        raise UserError(f"{setting}, but {package} is not installed; install it, or leave this out")
    if package == "torch" and optim.optimizer.endswith("8bit"):
        setting = f"{where}{key}.optimizer={optim.optimizer}"
        raise UserError(
            f"{setting}, but torch.optim has no optimizer in 8 bits; set {key}.optimizer_impl=torchao.optim"
        )


def has_stop_strings(workflow: Workflow, policy: str) -> bool:
    """Return whether an agent of the policy samples with stop strings, in training or validation."""
    agents = [agent for agent in workflow.agents if agent.policy == policy]
    return any(agent.stop_strings(validate=validate) for agent in agents for validate in (False, True))


def _apply_algorithm(actor: DictConfig, algorithm: Algorithm, policy: Policy, run: DictConfig) -> None:
    actor.clip_ratio_low, actor.clip_ratio_high = algorithm.clip_ratio_low, algorithm.clip_ratio_high
    actor.clip_ratio = algorithm.clip_ratio_low
    actor.loss_agg_mode = algorithm.loss_agg
    actor.clip_ratio_c = algorithm.clip_ratio_c
    actor.policy_loss.loss_mode = algorithm.policy_loss
    if algorithm.policy_loss == "cpgd":
        actor.policy_loss.ppo_kl_coef = algorithm.policy_drift_coef
    actor.entropy_coeff = algorithm.entropy_coef
    actor.use_kl_loss = policy.reference is not None and algorithm.kl_loss_coef > 0
    actor.kl_loss_coef = algorithm.kl_loss_coef
    actor.ppo_epochs = algorithm.epochs
    actor.data_loader_seed = run.seed
    if policy.lr is not None:
        actor.optim.lr = policy.lr
    actor.fsdp_config.seed = run.seed


def _apply_offload(engine: DictConfig, *, between_turns: bool) -> None:
    """Replace `null` offload settings: offload between turns, unless FSDP2's own offloading is on."""
    for key in ("param_offload", "optimizer_offload"):
        if engine[key] is None:
            engine[key] = between_turns and not engine.offload_policy


def _apply_platform(config: DictConfig, platform: str) -> None:
    if platform == "cpu":
        config["actor_rollout_ref"] = OmegaConf.merge(config.actor_rollout_ref, CPU_CONFIG)
        for engine in (config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config):
            # verl's default, bf16, is slow and inexact on a CPU
            engine.mixed_precision = FP32
        config.trainer.device = "cpu"
    node = config.actor_rollout_ref
    prepare_model(node.model, platform=platform, sequence_parallel=_ulysses(node) > 1)


def prepare_model(model: DictConfig, *, platform: str, sequence_parallel: bool) -> None:
    """Choose the attention and the kernels of verl's model configuration if they are open, and pass the options of our
    engine on to it."""
    configured = model.override_config.get("attn_implementation")
    if configured is None or (platform == "cpu" and configured in PACKAGES):  # these packages need a GPU
        # padded rows need no kernel for packed ones, but verl's sequence parallelism takes packed rows only
        if missing_attention(VARLEN) and not sequence_parallel:
            model.use_remove_padding = False
        packed = FLASH if missing_attention(VARLEN) else VARLEN
        chosen = packed if model.use_remove_padding else PADDED
        model.override_config = {**model.override_config, "attn_implementation": chosen}
    backend = model.fused_kernel_options.impl_backend or ("torch" if platform == "cpu" else "triton")
    recompute = {key: model.pop(key, None) or 0 for key in ("recompute_mlp_only", "recompute_nothing")}
    # verl's own switch replaces the forward of the model's class; recipe.dag.policy.engine reads the options instead
    model.fused_kernel_options = {
        "impl_backend": backend if model.use_fused_kernels else None,
        # verl's offloading of activations recomputes whole layers itself
        **(dict.fromkeys(recompute, 0) if model.enable_activation_offload else recompute),
    }
    model.use_fused_kernels = False
    model.use_liger = platform != "cpu" and uses_liger(model)  # its kernels need a GPU


def check_schedule(optim: DictConfig, run: DictConfig, key: str, where: str) -> None:
    """Raise UserError for a learning rate that follows the last step, where tokens end the run. `key`: that of `optim`
    in the configuration."""
    by_share = (optim.lr_warmup_steps or 0) <= 0 < optim.lr_warmup_steps_ratio
    if run.trainer.total_training_tokens is not None and (by_share or optim.lr_scheduler_type != "constant"):
        raise UserError(
            f"{where}trainer.total_training_tokens leaves the last step unknown, so a learning rate cannot follow it; "
            f"set {key}.lr_scheduler_type=constant, and lr_warmup_steps in place of lr_warmup_steps_ratio"
        )


def _apply_sequence_parallel(config: DictConfig, policy: Policy, name: str, model_path: str, processes: int) -> None:
    """Give all models of a policy the actor's number of GPUs that share rows, since they read the same rows. Raises
    UserError if its processes or the model's heads cannot be divided so."""
    node = config.actor_rollout_ref
    if (size := _ulysses(node)) == 1 or policy.frozen:
        return
    for part in (node.actor, node.actor.fsdp_config, node.ref, node.ref.fsdp_config, config.critic, config.critic.fsdp):
        part.ulysses_sequence_parallel_size = size
    model = AutoConfig.from_pretrained(model_path, trust_remote_code=policy.model.trust_remote_code).get_text_config()
    heads = model.num_attention_heads
    shared = getattr(model, "num_key_value_heads", None) or heads
    reason = ""
    if policy.lora is not None:
        reason = "adapters are not trained on rows that GPUs share; leave it out"
    elif processes % size:
        reason = f"the policy has {processes} processes, of which it has to be a divisor"
    elif heads % size or shared % size and size % shared:
        reason = f"it has to divide the {heads} heads of the model, and its {shared} key-value heads or be a multiple"
    if reason:
        raise UserError(f"policy {name}: ulysses_sequence_parallel_size={size}: {reason}")


def _ulysses(node: DictConfig) -> int:
    """Return the size of the sequence parallel group; verl reads either key."""
    return max(
        int(node.actor.ulysses_sequence_parallel_size), int(node.actor.fsdp_config.ulysses_sequence_parallel_size)
    )
