"""Keys of verl's configuration that a `config` cannot set, with the setting to use instead.

Invariant: a setting has one place. These tables contain the keys that an option of the workflow or of the run decides,
that the engine sets, or that have no effect; every other key under verl's `actor_rollout_ref` and `critic` may be set.
`recipe.dag.settings.verl_reads` lists those; a test checks that every key of verl is in one of the two. In a message,
`@` precedes a key of the same branch.
"""

from __future__ import annotations

_POLICY = "`policies.<name>.{}` says this; set it there"
_CRITIC = "`policies.<name>.critic.{}` says this; set it there"
_AGENT = "nothing reads it here; write `{}` of the agent"
_ALGORITHM = "`algorithm.{}` says this, for all policies; set it there"
_RUN = "the run's configuration says this, for all policies; nothing reads it here: pass `{}` to the run"
_COUNTED = "the engine counts the steps; `trainer.total_training_steps=...` of the run says how many there are"
_STEPS = "nothing reads it; optimizer steps are counted by `{}`, not by their size"
_ROWS = "nothing reads it; write `@{}`, which serves every pass"
_WRITE = "nothing reads it; write `@{}`"
_LOADER = "nothing reads it; the order of the rows follows from the run's `seed`"
_ALWAYS = "nothing reads it here; {}"
_SERVER = "SGLang does not read it; write `@rollout.engine_kwargs.sglang.{}`"
_ON = "SGLang does it unless `@rollout.engine_kwargs.sglang.{}` is {}; set that instead"
_LOSS = "no loss of `algorithm.policy_loss` reads it; remove it"
_ENTROPY = "the {} computes no entropy; remove it"
_OTHER = "only {} reads it; remove it"
_PROFILER = "nothing starts verl's profiler here; remove it"
_CLASS = "verl names its own classes; remove it"
_QAT = "SGLang takes no weights of quantization-aware training; remove it"
_LORA = "LoRA policies are not supported yet; remove it"

ACTOR: dict[str, str] = {
    "model.path": _POLICY.format("model.path"),
    "model.tokenizer_path": _POLICY.format("model.tokenizer_path"),
    "model.trust_remote_code": _POLICY.format("model.trust_remote_code"),
    "model.custom_chat_template": "prompts do not use it; put it into the folder that `model.tokenizer_path` names",
    "model.lora": _LORA,
    "model.lora_rank": _LORA,
    "model.lora_alpha": _LORA,
    "model.lora_adapter_path": _LORA,
    "model.target_modules": _LORA,
    "model.exclude_modules": _LORA,
    "model.tiled_mlp": _ALWAYS.format("remove it"),
    "model.mtp.enable_train": _OTHER.format("Megatron"),
    "model.mtp.detach_encoder": _OTHER.format("Megatron"),
    "model.mtp.mtp_loss_scaling_factor": _OTHER.format("Megatron"),
    "model.mtp.method": _OTHER.format("vLLM"),
    "model.mtp.num_speculative_tokens": _OTHER.format("vLLM"),
    "actor.optim.lr": _POLICY.format("lr"),
    "actor.optim.total_training_steps": _COUNTED,
    "actor.clip_ratio": _ALGORITHM.format("clip_ratio_low` and `algorithm.clip_ratio_high"),
    "actor.clip_ratio_low": _ALGORITHM.format("clip_ratio_low"),
    "actor.clip_ratio_high": _ALGORITHM.format("clip_ratio_high"),
    "actor.clip_ratio_c": _ALGORITHM.format("clip_ratio_c"),
    "actor.entropy_coeff": _ALGORITHM.format("entropy_coef"),
    "actor.kl_loss_coef": _ALGORITHM.format("kl_loss_coef"),
    "actor.use_kl_loss": _ALGORITHM.format("kl_loss_coef"),
    "actor.loss_agg_mode": _ALGORITHM.format("loss_agg"),
    "actor.policy_loss.ppo_kl_coef": _ALGORITHM.format("policy_drift_coef"),
    "actor.policy_loss": _ALGORITHM.format("policy_loss"),
    "actor.loss_scale_factor": _LOSS,
    "actor.tau_pos": _LOSS,
    "actor.tau_neg": _LOSS,
    "actor.freeze_vision_tower": _ALWAYS.format("all weights are trained"),
    "actor.calculate_entropy": _ALWAYS.format("the entropy is always among the metrics"),
    "actor.calculate_sum_pi_squared": _ALWAYS.format("remove it"),
    "actor.use_prefix_grouper": _ALWAYS.format("remove it"),
    "actor.use_fused_kernels": _WRITE.format("model.use_fused_kernels"),
    "actor.use_remove_padding": _WRITE.format("model.use_remove_padding"),
    "actor.use_torch_compile": _WRITE.format("actor.fsdp_config.use_torch_compile"),
    "actor.checkpoint.async_save": _OTHER.format("Megatron"),
    "actor.checkpoint.strict": _OTHER.format("Megatron"),
    "actor.qat": _QAT,
    "actor.fsdp_config.qat": _QAT,
    "actor.fsdp_config.turbo_config": _OTHER.format("the strategy fsdp_turbo"),
    "actor.fsdp_config.use_orig_params": _OTHER.format("FSDP 1"),
    "actor.fsdp_config.wrap_policy": "FSDP 2 shards the blocks that the model names; remove it",
    "actor.fsdp_config.strategy": _WRITE.format("actor.strategy"),
    "actor.fsdp_config.dtype": _WRITE.format("actor.fsdp_config.mixed_precision.param_dtype"),
    "actor.fsdp_config.forward_only": _ALWAYS.format("an actor is trained"),
    "actor.ppo_epochs": _ALGORITHM.format("epochs"),
    "actor.ppo_mini_batch_size": _STEPS.format("algorithm.mini_batches"),
    "actor.ppo_micro_batch_size": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "actor.grad_clip": _WRITE.format("actor.optim.clip_grad"),
    "actor.shuffle": _LOADER,
    "actor.data_loader_seed": _LOADER,
    "actor.fsdp_config.seed": _RUN.format("seed=..."),
    "actor.profiler": _PROFILER,
    "ref.profiler": _PROFILER,
    "rollout.profiler": _PROFILER,
    "actor.rollout_n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "ref.rollout_n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "ref.log_prob_micro_batch_size": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "ref.log_prob_micro_batch_size_per_gpu": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "ref.log_prob_use_dynamic_bsz": _ROWS.format("actor.use_dynamic_bsz"),
    "ref.use_torch_compile": _ENTROPY.format("reference"),
    "ref.entropy_from_logits_with_chunking": _ENTROPY.format("reference"),
    "ref.entropy_from_logits_chunk_size": _ENTROPY.format("reference"),
    "ref.entropy_checkpointing": _ENTROPY.format("reference"),
    "ref.fsdp_config.use_torch_compile": _ENTROPY.format("reference"),
    "ref.fsdp_config.entropy_from_logits_with_chunking": _ENTROPY.format("reference"),
    "ref.fsdp_config.entropy_from_logits_chunk_size": _ENTROPY.format("reference"),
    "ref.fsdp_config.entropy_checkpointing": _ENTROPY.format("reference"),
    "ref.fsdp_config.param_offload": _ALWAYS.format("verl always keeps a reference in host memory"),
    "ref.fsdp_config.offload_policy": _ALWAYS.format("verl always keeps a reference in host memory"),
    "ref.fsdp_config.optimizer_offload": _ALWAYS.format("a reference has no optimizer"),
    "ref.fsdp_config.use_no_sync_for_gradient_accumulation": _ALWAYS.format("a reference has no gradients"),
    "ref.fsdp_config.forward_only": _ALWAYS.format("a reference is never trained"),
    "ref.fsdp_config.seed": _RUN.format("seed=..."),
    "ref.fsdp_config.strategy": _WRITE.format("ref.strategy"),
    "ref.fsdp_config.dtype": _WRITE.format("ref.fsdp_config.mixed_precision.param_dtype"),
    "ref.fsdp_config.qat": _QAT,
    "ref.fsdp_config.turbo_config": _OTHER.format("the strategy fsdp_turbo"),
    "ref.fsdp_config.use_orig_params": _OTHER.format("FSDP 1"),
    "ref.fsdp_config.wrap_policy": "FSDP 2 shards the blocks that the model names; remove it",
    "rollout.log_prob_micro_batch_size": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "rollout.log_prob_micro_batch_size_per_gpu": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "rollout.log_prob_use_dynamic_bsz": _ROWS.format("actor.use_dynamic_bsz"),
    "rollout.n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "rollout.name": _ALWAYS.format("the run chooses the server"),
    "rollout.mode": _ALWAYS.format("the server works on token ids, asynchronously"),
    "rollout.seed": _RUN.format("seed=..."),
    "rollout.custom": _ALWAYS.format("the engine overwrites it"),
    "rollout.temperature": _AGENT.format("sampling: {temperature: ...}"),
    "rollout.top_p": _AGENT.format("sampling: {top_p: ...}"),
    "rollout.top_k": _AGENT.format("sampling: {top_k: ...}"),
    "rollout.repetition_penalty": _AGENT.format("sampling: {repetition_penalty: ...}"),
    "rollout.ignore_eos": _AGENT.format("sampling: {ignore_eos: ...}"),
    "rollout.response_length": _AGENT.format("sampling: {max_tokens: ...}"),
    "rollout.do_sample": _AGENT.format("sampling: {temperature: ...}"),
    "rollout.prompt_length": _RUN.format("data.max_prompt_length=..."),
    "rollout.val_kwargs.n": _RUN.format("validation.n=..."),
    "rollout.val_kwargs.do_sample": "nothing reads it; greedy is `validation: {temperature: 0}` of the agent",
    "rollout.val_kwargs": _AGENT.format("validation: {...}"),
    "rollout.multi_turn": "nothing reads it; `episode.max_turns` says how many turns there are",
    **{
        f"rollout.multi_turn.{key}": _AGENT.format(setting)
        for key, setting in (
            ("max_parallel_calls", "tool_loop: {max_parallel: ...}"),
            ("max_tool_response_length", "tool_loop: {max_response_chars: ...}"),
            ("tool_response_truncate_side", "tool_loop: {truncate: ...}"),
            ("format", "tool_loop: {format: ...}"),
            ("tool_config_path", "tools: [...]"),
            ("function_tool_path", "tools: [...]"),
        )
    },
    **dict.fromkeys(
        ("rollout.multi_turn.max_assistant_turns", "rollout.multi_turn.max_user_turns"),
        "nothing reads it; `episode.max_turns` says how many turns there are, and `tool_loop: {max_generations: ...}` "
        "of the agent how often it generates in one",
    ),
    "rollout.multi_turn.tokenization_sanity_check_mode": _ALWAYS.format(
        "sampled tokens are never rendered again; a row whose ids, mask and log-probs differ in length ends the run"
    ),
    "rollout.multi_turn.use_all_traj": "nothing reads it; `episode.train_turns` says which turns are trained on",
    "rollout.agent": "nothing reads it; the workflow is the agent loop",
    "rollout.agent.num_workers": "nothing reads it; all episodes run at once",
    "rollout.agent.rewards_with_env": "nothing reads it; `agent_options.rewards_with_env` of the node says it",
    "rollout.calculate_log_probs": _ALWAYS.format("the server always gives them"),
    "rollout.nnodes": _RUN.format("trainer.nnodes=..."),
    "rollout.n_gpus_per_node": _RUN.format("trainer.n_gpus_per_node=..."),
    "rollout.enable_chunked_prefill": _ON.format("chunked_prefill_size", "-1"),
    "rollout.enable_prefix_caching": _ON.format("disable_radix_cache", "true"),
    "rollout.max_num_batched_tokens": _SERVER.format("max_prefill_tokens"),
    "rollout.cudagraph_capture_sizes": _SERVER.format("cuda_graph_bs"),
    "rollout.scheduling_policy": _SERVER.format("schedule_policy"),
    "rollout.logprobs_mode": _OTHER.format("vLLM"),
    "rollout.quantization_config_file": _OTHER.format("vLLM"),
    "rollout.engine_kwargs.vllm": _OTHER.format("vLLM"),
    "rollout.engine_kwargs.trtllm": _OTHER.format("TensorRT-LLM"),
    "rollout.multi_stage_wake_up": _OTHER.format("vLLM"),
    "rollout.pipeline_model_parallel_size": _OTHER.format("vLLM"),
    "rollout.layered_summon": _LORA,
    "rollout.over_sample_rate": "nothing reads it; `algorithm.dynamic_sampling` rolls out more samples than it keeps",
    "rollout.trace": "nothing reads it; all calls are in the episodes.jsonl of the output folder",
    "rollout.enable_rollout_routing_replay": _ALWAYS.format("the trainer replays no routing"),
    "rollout.moe_load_balance_metrics_interval": _ALWAYS.format("remove it"),
    "rollout.mtp": _WRITE.format("model.mtp"),
    "rollout.qat": _QAT,
    "rollout.disaggregation": _ALWAYS.format("prefill and decode run on the same servers"),
    "model_params": "nothing reads it; `gpus` under the policy places it",
}
"""Keys under `actor_rollout_ref` -> error message, also for keys inside them that have no entry."""

CRITIC: dict[str, str] = {
    "enable": "`policies.<name>.critic` says this; a policy that has one trains it",
    "model.path": _CRITIC.format("model.path"),
    "model.tokenizer_path": "a critic reads the tokens of its policy: `policies.<name>.model.tokenizer_path`",
    "model.trust_remote_code": _CRITIC.format("model.trust_remote_code"),
    "model.custom_chat_template": _ALWAYS.format("a critic reads the tokens of its policy"),
    "model.lora": _LORA,
    "model.lora_rank": _LORA,
    "model.lora_alpha": _LORA,
    "model.lora_adapter_path": _LORA,
    "model.target_modules": _LORA,
    "model.exclude_modules": _LORA,
    "model.tiled_mlp": _ALWAYS.format("remove it"),
    "model.mtp": _OTHER.format("a language model"),
    "optim.lr": _CRITIC.format("lr"),
    "optim.total_training_steps": _COUNTED,
    "cliprange_value": _CRITIC.format("cliprange_value"),
    "ppo_epochs": _CRITIC.format("epochs"),
    "ppo_mini_batch_size": _STEPS.format("critic.mini_batches"),
    "ppo_micro_batch_size": _ROWS.format("ppo_micro_batch_size_per_gpu"),
    "forward_micro_batch_size": _ROWS.format("ppo_micro_batch_size_per_gpu"),
    "forward_micro_batch_size_per_gpu": _ROWS.format("ppo_micro_batch_size_per_gpu"),
    "forward_max_token_len_per_gpu": _ROWS.format("ppo_max_token_len_per_gpu"),
    "grad_clip": _WRITE.format("optim.clip_grad"),
    "shuffle": _LOADER,
    "data_loader_seed": _LOADER,
    "fsdp.seed": _RUN.format("seed=..."),
    "fsdp.strategy": _WRITE.format("strategy"),
    "fsdp.dtype": _WRITE.format("fsdp.mixed_precision.param_dtype"),
    "fsdp.forward_only": _ALWAYS.format("a critic is trained"),
    "fsdp.use_torch_compile": _ENTROPY.format("critic"),
    "fsdp.entropy_from_logits_with_chunking": _ENTROPY.format("critic"),
    "fsdp.entropy_from_logits_chunk_size": _ENTROPY.format("critic"),
    "fsdp.entropy_checkpointing": _ENTROPY.format("critic"),
    "fsdp.qat": _QAT,
    "fsdp.turbo_config": _OTHER.format("the strategy fsdp_turbo"),
    "fsdp.use_orig_params": _OTHER.format("FSDP 1"),
    "fsdp.wrap_policy": "FSDP 2 shards the blocks that the model names; remove it",
    "checkpoint.async_save": _OTHER.format("Megatron"),
    "profiler": _PROFILER,
    "rollout_n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "model_params": "nothing reads it; `gpus` under the policy places it",
}
"""Keys under `critic` -> error message, also for keys inside them that have no entry."""


def why_not(key: str, *, critic: bool, policy: str) -> str | None:
    """Return the error message for a dotted key in the `config` of `policy` or its critic; None if it may be set."""
    message = reason_of(key, critic=critic)
    return None if message is None else message.replace("<name>", policy).replace("@", "")


def reason_of(key: str, *, critic: bool) -> str | None:
    """Return the message for the key, or for the nearest block that contains it, with its placeholders; or None."""
    table = CRITIC if critic else ACTOR
    parts = key.split(".")
    if parts[-1] == "_target_":
        return _CLASS
    blocks = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((table[block] for block in blocks if block in table), None)


def rows_key(critic: bool) -> tuple[str, str]:
    """Return (the key for the rows per micro-batch, the key that forms micro-batches by tokens instead)."""
    prefix = "" if critic else "actor."
    return f"{prefix}ppo_micro_batch_size_per_gpu", f"{prefix}use_dynamic_bsz"
