"""Keys of verl's `actor_rollout_ref` and `critic` that verl's workers and servers read when this project runs them.

Invariant: this is an allow-list. A key that is not in it has no effect, so every other key is refused where it is
written; a test checks that verl has the keys of the list. `*` matches any keys. Compiled by hand from verl 0.9.1:
`engine_workers.py`, `engine/fsdp/`, `workers/config/`, `rollout/sglang_rollout/`, `rollout/llm_server.py`,
`checkpoint_engine/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_OPTIMIZER = (
    "optimizer optimizer_impl lr_warmup_steps_ratio weight_decay lr_warmup_steps betas clip_grad min_lr_ratio "
    "num_cycles lr_scheduler_type zero_indexed_step warmup_style override_optimizer_config.*"
)
_SHARDING = (
    "reshard_after_forward fsdp_size forward_prefetch model_dtype "
    "full_determinism ulysses_sequence_parallel_size pad_to_length pad_to_length_bucket mixed_precision.*"
)
_TRAINED = "param_offload optimizer_offload offload_policy use_no_sync_for_gradient_accumulation"
_ENTROPY = "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing"
_MODEL = (
    "hf_config_path use_shm external_lib override_config.* enable_gradient_checkpointing enable_activation_offload "
    "use_remove_padding use_liger use_fused_kernels fused_kernel_options.*"
)
_CHECKPOINT = "save_contents load_contents"

ACTOR: dict[str, str] = {
    "": "nccl_timeout",  # PolicyWorker reads it
    "actor": "strategy use_dynamic_bsz ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu kl_loss_type "
    f"ulysses_sequence_parallel_size pad_to_length {_ENTROPY}",
    "actor.optim": _OPTIMIZER,
    "actor.fsdp_config": f"{_SHARDING} {_TRAINED} {_ENTROPY} use_torch_compile",
    "actor.checkpoint": _CHECKPOINT,
    "ref": "strategy log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size pad_to_length",
    "ref.fsdp_config": _SHARDING,
    "model": f"{_MODEL} recompute_mlp_only recompute_nothing",  # PolicyEngine reads the latter two
    "model.mtp": "enable enable_rollout speculative_algorithm speculative_num_steps speculative_eagle_topk "
    "speculative_num_draft_tokens",
    "rollout": "dtype gpu_memory_utilization enforce_eager free_cache_engine tensor_model_parallel_size "
    "data_parallel_size expert_parallel_size max_model_len max_num_seqs load_format log_prob_max_token_len_per_gpu "
    "disable_log_stats skip_tokenizer_init router_config_path full_determinism quantization",
    "rollout.engine_kwargs.sglang": "*",
    "rollout.checkpoint_engine": "backend update_weights_bucket_megabytes engine_kwargs.* custom_backend_module",
    "rollout.prometheus": "enable port file served_model_name",
}
"""Block below `actor_rollout_ref` -> names of its keys."""

CRITIC: dict[str, str] = {
    "": "strategy use_dynamic_bsz ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu loss_agg_mode "
    "loss_scale_factor ulysses_sequence_parallel_size",
    "optim": _OPTIMIZER,
    "fsdp": f"{_SHARDING} {_TRAINED}",
    "model": _MODEL,
    "checkpoint": _CHECKPOINT,
}
"""Block below `critic` -> names of its keys."""


def keys_of(table: dict[str, str]) -> Iterator[str]:
    """Yield the dotted keys of a table; a block that may have any keys ends in `.*`."""
    for block, names in table.items():
        yield from (f"{block}.{name}" if block else name for name in names.split())


def is_listed(key: str, keys: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `keys`; `block.*` stands for the block itself and every key below it."""
    return any(key == name or name.endswith(".*") and f"{key}.".startswith(name.removesuffix("*")) for name in keys)
