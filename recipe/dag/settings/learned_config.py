"""The keys of a run's configuration that affect learning.

Invariant: these are all keys of verl's `actor_rollout_ref` and `critic` except those known to be resources, output or
paths (whose content is compared elsewhere), so a key that is not listed here counts.
"""

from __future__ import annotations

import re
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from recipe.dag.workflow.flatten import flatten

KEYS = (
    "seed sandbox.timeout_s sandbox.memory_mb data.train_batch_size data.max_prompt_length data.max_response_length "
    "data.stratify_key"
).split()
"""Keys outside verl's sections that affect learning; null counts as absent."""
SUBSET_KEYS = ("data.subset.size", "data.subset.seed")
_FOLDERS = (
    "agent checkpoint checkpoint_engine disaggregation multi_turn profiler prometheus server trace turbo_config "
    "val_kwargs wrap_policy"
).split()
_RESOURCE = re.compile(
    r"caching|checkpointing|chunk|cuda_?graph|dynamic_bsz|eager|free_cache|fsdp_size|full_determinism|fused|gpu_memory"
    r"|hybrid_engine|impl_backend|layered_summon|liger|load_balance|load_format|log_stats|max_num_|max_token_len"
    r"|micro_batch|n_gpus|nccl|nnodes|no_sync|offload|pad_to_length|parallel_size|prefetch|recompute|remove_padding"
    r"|reshard|scheduling_policy|torch_compile|total_training_steps|use_shm|wake_up|^_target_$|^mode$|^name$|seed$|^strict$"
    r"|mem_fraction|max_prefill_tokens|max_running_requests|log_level|schedule_policy|skip_tokenizer_init"
    r"|(?:attention|sampling|grammar)_backend"
    r"|^path$|^tokenizer_path$|^hf_config_path$|^router_config_path$"
)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,[^{}]*)?\}")


def learned_config(run: DictConfig, *, critics: bool) -> dict[str, dict[str, Any]]:
    """Return the values as JSON, by section and dotted key. `critics`: whether a policy has one."""
    values = {key: value for key, value in _flat_config(run, resolve=True).items() if value != {}}
    keys = KEYS if values.get("data.subset.size") is None else (*KEYS, *SUBSET_KEYS)
    sections = {"run": {key: values[key] for key in keys if values.get(key) is not None}}
    for section in ("actor_rollout_ref", "critic") if critics else ("actor_rollout_ref",):
        keys = [key for key in values if key.startswith(f"{section}.") and is_learned(key)]
        sections[section] = {key: values[key] for key in sorted(keys)}
    return sections


def repeated_keys(run: DictConfig) -> dict[str, str]:
    """Return key -> the key whose value it interpolates."""
    texts = {key: value for key, value in _flat_config(run, resolve=False).items() if isinstance(value, str)}
    matches = {key: _REFERENCE.fullmatch(text) for key, text in texts.items()}
    return {key: match[1] for key, match in matches.items() if match is not None}


def is_learned(key: str) -> bool:
    """Return whether a dotted key below `actor_rollout_ref` or `critic` affects learning."""
    *folders, last = key.split(".")
    return _RESOURCE.search(last) is None and not set(folders).intersection(_FOLDERS)


def _flat_config(run: DictConfig, *, resolve: bool) -> dict[str, Any]:
    tree = cast("dict[str, Any]", OmegaConf.to_container(run, resolve=resolve))  # a DictConfig becomes a dict
    return {key: value for key, value, _ in flatten(tree)}
