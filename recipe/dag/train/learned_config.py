"""Which keys of a run's configuration decide what is learned.

Invariant: all of verl's `actor_rollout_ref` and `critic` but what is known to be resources, output or paths (whose
content is compared elsewhere), so that a key that this list does not know counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

KEYS = (
    *("seed", "sandbox.timeout_s", "sandbox.memory_mb"),
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length"),
)
"""What counts outside of verl's sections."""
_FOLDERS = {
    *("agent", "checkpoint", "checkpoint_engine", "disaggregation", "multi_turn", "profiler", "prometheus", "server"),
    *("trace", "turbo_config", "val_kwargs", "wrap_policy"),
}
_RESOURCE = re.compile(
    r"caching|checkpointing|chunk|cuda_?graph|dynamic_bsz|eager|free_cache|fsdp_size|full_determinism|fused|gpu_memory"
    r"|hybrid_engine|impl_backend|layered_summon|liger|load_balance|load_format|log_stats|max_num_|max_token_len"
    r"|micro_batch|n_gpus|nccl|nnodes|no_sync|offload|pad_to_length|parallel_size|prefetch|remove_padding|reshard"
    r"|scheduling_policy|torch_compile|total_training_steps|use_shm|wake_up|^_target_$|^mode$|^name$|seed$|^strict$"
    r"|mem_fraction|max_prefill_tokens|max_running_requests|log_level|schedule_policy|skip_tokenizer_init"
    r"|(?:attention|sampling|grammar)_backend"
    r"|^path$|^tokenizer_path$|^hf_config_path$|^router_config_path$"
)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,[^{}]*)?\}")


def learned_config(run: DictConfig, *, critics: bool) -> dict[str, dict[str, Any]]:
    """Return the values, JSON-able, by section and dotted key. `critics`: whether a policy has one."""
    values = {k: value for k, value in flatten(OmegaConf.to_container(run, resolve=True)) if value != {}}
    sections = {"run": {key: values[key] for key in KEYS if key in values}}
    for section in ("actor_rollout_ref", "critic") if critics else ("actor_rollout_ref",):
        keys = [key for key in values if key.startswith(f"{section}.") and is_learned(key)]
        sections[section] = {key: values[key] for key in sorted(keys)}
    return sections


def repeated_keys(run: DictConfig) -> dict[str, str]:
    """Return key -> the key whose value it takes over."""
    written = flatten(OmegaConf.to_container(run, resolve=False))
    matches = {key: _REFERENCE.fullmatch(value) for key, value in written if isinstance(value, str)}
    return {key: match[1] for key, match in matches.items() if match is not None}


def is_learned(key: str) -> bool:
    """Whether a dotted key below `actor_rollout_ref` or `critic` decides what is learned."""
    *folders, last = key.split(".")
    return _RESOURCE.search(last) is None and not _FOLDERS.intersection(folders)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that is no mapping; keys that are dotted already stay so."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
