"""Composes the configuration of supervised fine-tuning: `config/sft.yaml` over verl's groups, and typed keys.

Invariant: a key that is typed exists and is read, and its value has the right kind; otherwise there is a UserError with
a line for each key, before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.settings.compose import CONFIG_FOLDER, compose_checked, compose_file
from recipe.dag.settings.kinds import (
    COUNT,
    LIST,
    NOT_NEGATIVE,
    PATHS,
    POSITIVE,
    TRUTH,
    ValueKind,
    one_of,
    or_null,
    whole,
)
from recipe.dag.settings.schema import Tree, plain, values_of
from recipe.dag.settings.typed import Typed
from recipe.dag.settings.values import kind_of
from recipe.dag.workflow.adapter_shape import ALL_LINEAR, AdapterShape

NAME = "sft"
OWN_DATA = "pkg://recipe.dag.train.sft.data"
_MISSING = object()
_EVERY = ValueKind(
    "after_each_epoch, -1, or a whole number, 1 or more",
    lambda value: value in ("after_each_epoch", -1) or COUNT.accepts(value),
)
KINDS: dict[str, ValueKind] = {
    "platform": one_of("auto", "cuda", "cpu"),
    "data.train_files": PATHS,
    "data.max_length": COUNT,
    "data.truncation": one_of("drop", "right", "left", "error"),
    "data.max_token_len_per_gpu": or_null(COUNT),
    "data.micro_batch_size_per_gpu": COUNT,
    "model.use_liger": or_null(TRUTH),
    "model.enable_gradient_checkpointing": or_null(TRUTH),
    "model.fused_kernel_options.impl_backend": or_null(one_of("triton", "torch")),
    "lora.rank": or_null(COUNT),
    "lora.alpha": or_null(POSITIVE),
    "lora.targets": or_null(LIST),
    "optim.lr": NOT_NEGATIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.lr_scheduler_type": one_of("constant", "cosine"),
    "engine.strategy": one_of("fsdp2"),
    "engine.reshard_after_forward": or_null(TRUTH),
    "engine.use_no_sync_for_gradient_accumulation": or_null(TRUTH),
    "trainer.total_epochs": COUNT,
    "trainer.total_training_steps": or_null(COUNT),
    "trainer.save_freq": _EVERY,
    "trainer.test_freq": _EVERY,
    "trainer.resume_mode": one_of("auto", "disable", "force"),
    "trainer.max_ckpt_to_keep": whole(0),
    "trainer.nccl_timeout": COUNT,
}
FREE = ("data.apply_chat_template_kwargs", "model.override_config", "optim.override_optimizer_config")
"""Blocks that take any keys: they are a template's, a model's and an optimizer's."""
REFUSED = {
    "profiler": "nothing starts verl's profiler; remove it",
    "model.tokenizer_path": "the tokenizer is the model's, and is saved with it; remove it",
    "model.lora": "Megatron's; remove it",
    "model.lora_rank": "pass `lora.rank=...`",
    "model.lora_alpha": "pass `lora.alpha=...`",
    "model.lora_adapter_path": "an adapter starts as its model; remove it",
    "model.target_modules": "pass `lora.targets=[...]`",
    "model.exclude_modules": "pass `lora.targets=[...]`",
    "model.mtp": "no loss trains such heads; remove it",
    "engine.forward_only": "training needs gradients; remove it",
    "engine.seed": "pass `seed=...`",
    "optim.total_training_steps": "pass `trainer.total_training_steps=...`",
    "checkpoint": "a checkpoint always holds model, optimizer, state and the model folder; remove it",
}
"""Key or block -> why it has no effect here."""
_COSINE = "remove it, or set optim.lr_scheduler_type=cosine"
IDLE: tuple[tuple[str, str, Any, str], ...] = (
    ("optim.min_lr_ratio", "optim.lr_scheduler_type", "constant", _COSINE),
    ("optim.num_cycles", "optim.lr_scheduler_type", "constant", _COSINE),
    ("optim.zero_indexed_step", "optim.lr_scheduler_type", "constant", _COSINE),
    ("data.micro_batch_size_per_gpu", "data.use_dynamic_bsz", True, "remove it, or set data.use_dynamic_bsz=false"),
    ("data.max_token_len_per_gpu", "data.use_dynamic_bsz", False, "remove it, or set data.use_dynamic_bsz=true"),
    ("lora.alpha", "lora.rank", None, "set lora.rank, too"),
    ("lora.targets", "lora.rank", None, "set lora.rank, too"),
    ("data.custom_cls.name", "data.custom_cls.path", OWN_DATA, "remove it, or set data.custom_cls.path to your file"),
)
"""Keys that have no effect if another key has a value: key, that key, its value, what to do."""


def adapter_shape(config: DictConfig) -> AdapterShape | None:
    """Return the shape of the adapter that is trained; None if it is the model."""
    lora = config.lora
    if lora.rank is None:
        return None
    return AdapterShape(lora.rank, float(lora.alpha or 2 * lora.rank), tuple(lora.targets or (ALL_LINEAR,)))


def compose_sft(overrides: Sequence[str], *, name: str = NAME, folder: Path | None = None) -> DictConfig:
    """Compose `name`.yaml of `folder` and apply `overrides`. Raises UserError."""
    return compose_checked(name, overrides, folder, SftChecks(name))


class SftChecks(NamedTuple):
    """The checks of a configuration file that extends sft.yaml."""

    name: str

    def check_keys(self, tree: Tree, settings: Sequence[Typed]) -> Iterator[str]:
        if "truncation" not in tree.get("data", {}):
            reason = "is not for verl-dag sft; start it with `defaults: [sft, _self_]`"
            raise UserError(f"configuration: {self.name}.yaml {reason}")
        defaults = values_of(compose_file(NAME, (), CONFIG_FOLDER).tree)
        changed = {key: value for key, value in values_of(tree).items() if value != defaults.get(key, _MISSING)}
        from_file = [Typed(key, plain(value), f"configuration: {key}={value}") for key, value in changed.items()]
        for typed in [*from_file, *settings]:
            if (message := _refusal(typed, defaults)) is not None:
                yield message

    def check_values(self, config: DictConfig, values: Mapping[str, Any], typed: Mapping[str, Typed]) -> Iterator[str]:
        """Yield a message for each typed setting that has no effect next to the others."""
        for key, beside, value, reason in IDLE:
            setting = typed.get(key)
            if setting is not None and setting.value is not None and OmegaConf.select(config, beside) == value:
                shown = "null" if value is None else str(value).lower()
                yield f"{setting.argument}: nothing reads it with {beside}={shown}; {reason}"


def _refusal(typed: Typed, values: dict[str, Any]) -> str | None:
    """Return why a setting cannot be used; None if it can. `values`: the default of every key."""
    parts = typed.key.split(".")
    for length in range(len(parts), 0, -1):
        if (reason := REFUSED.get(".".join(parts[:length]))) is not None:
            return f"{typed.argument}: nothing reads it; {reason}"
    known = [key for key in values if key.partition(".")[0] not in REFUSED and key not in REFUSED]
    free = any(typed.key.startswith(f"{key}.") for key in FREE)
    if typed.key not in values and not free:
        same_name = [key for key in known if key.rpartition(".")[2] == parts[-1]]
        hint = f"; did you mean `{same_name[0]}`?" if same_name else did_you_mean(typed.key, known)
        return f"{typed.argument}: unknown key{hint}"
    kind = KINDS.get(typed.key) or kind_of(typed.key, plain(values.get(typed.key)))
    return None if kind.accepts(typed.value) else f"{typed.argument}: it takes {kind.takes}"
