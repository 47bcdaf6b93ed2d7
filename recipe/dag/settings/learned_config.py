"""The keys of a configuration that affect learning.

Invariant: these are all keys of dag.yaml and sft.yaml, and of verl's sections in them, except those known to be
resources, output or paths (whose content is compared elsewhere), so a key that is not listed here counts.
"""

from __future__ import annotations

import re
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from recipe.dag.core.flatten import flatten
from recipe.dag.settings.compose import run_schema
from recipe.dag.workflow.verl_reads import is_listed

UNLEARNED = {
    "dag": "workflow output_dir platform gpu_memory_gb model_path sandbox.url sandbox.token sandbox.isolation "
    "sandbox.accept_unsandboxed sandbox.max_concurrent sandbox.margin_s rollout.* validation.* "
    "report.conversations_file report.episodes_per_step report.compress report.token_columns report.keep_checkpoints "
    "report.coach_bias_steps data.train_files data.val_files data.train_max_samples data.val_max_samples "
    "data.val_overlap data.input_key data.label_key data.answer_format data.train_split data.train_name data.val_split "
    "data.val_name data.add_prompt_suffix trainer.* ray_kwargs.*",
    "sft": "output_dir platform data.train_files data.val_files data.val_max_samples data.use_dynamic_bsz "
    "data.max_token_len_per_gpu data.micro_batch_size_per_gpu engine.mixed_precision.* checkpoint.* profiler.* "
    "trainer.*",
}
"""Configuration file -> its own keys that do not affect learning, or whose content is compared in their place: problems
by themselves, whatever file they are read from. Precision follows from the platform."""
_VERL = {"dag": ("actor_rollout_ref", "critic"), "sft": ("model", "engine", "optim")}
"""Configuration file -> its sections of verl's keys."""
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
    r"|(?:attention|sampling|grammar)_backend|attn_implementation"
    r"|^path$|^tokenizer_path$|^hf_config_path$|^router_config_path$"
)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,[^{}]*)?\}")


def learned_config(run: DictConfig, *, critics: bool) -> dict[str, dict[str, Any]]:
    """Return the values of a run as JSON, by section and dotted key. `critics`: whether a policy has one."""
    values, own = learned_values(run, "dag"), run_schema().own
    if run.data.subset.size is None:
        values.pop("data.subset.seed")
    if run.report.on_flag != "mask":  # a flag changes nothing else
        values = {key: value for key, value in values.items() if not key.startswith("report.")}
    # verl's other sections are not read, and null counts as absent outside its sections
    outside = {key: value for key, value in values.items() if _section(key, "dag") is None and key in own}
    sections = {"run": {key: value for key, value in outside.items() if value is not None}}
    for section in ("actor_rollout_ref", "critic") if critics else ("actor_rollout_ref",):
        sections[section] = {key: value for key, value in values.items() if _section(key, "dag") == section}
    return sections


def learned_values(config: DictConfig, name: str) -> dict[str, Any]:
    """Return what affects learning in a composed configuration, by dotted key. `name`: dag or sft."""
    values = _flat_config(config, resolve=True).items()
    return {key: value for key, value in sorted(values) if value != {} and affects_learning(key, name)}


def affects_learning(key: str, name: str) -> bool:
    """Return whether a dotted key of the configuration `name` affects learning."""
    return not is_listed(key, UNLEARNED[name].split()) and (_section(key, name) is None or is_learned(key))


def _section(key: str, name: str) -> str | None:
    block = key.partition(".")[0]
    return block if block in _VERL[name] else None


def repeated_keys(run: DictConfig) -> dict[str, str]:
    """Return key -> the key whose value it interpolates."""
    texts = {key: value for key, value in _flat_config(run, resolve=False).items() if isinstance(value, str)}
    matches = {key: _REFERENCE.fullmatch(text) for key, text in texts.items()}
    return {key: match[1] for key, match in matches.items() if match is not None}


def is_learned(key: str) -> bool:
    """Return whether a dotted key of one of verl's sections affects learning."""
    *folders, last = key.split(".")
    return _RESOURCE.search(last) is None and not set(folders).intersection(_FOLDERS)


def _flat_config(run: DictConfig, *, resolve: bool) -> dict[str, Any]:
    tree = cast("dict[str, Any]", OmegaConf.to_container(run, resolve=resolve))  # a DictConfig becomes a dict
    return {key: value for key, value, _ in flatten(tree)}
