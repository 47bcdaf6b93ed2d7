"""Composes the configuration of supervised fine-tuning: `config/sft.yaml` over verl's groups, and typed keys.

Invariant: a key that is typed exists and is read, and its value has the right kind; otherwise there is a UserError with
a line for each key, before anything is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.dag.core.errors import UserError
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.settings.compose import CONFIG_FOLDER, compose_file, leaves_of
from recipe.dag.settings.kinds import COUNT, NOT_NEGATIVE, PATHS, TRUTH, Kind, one_of, or_null, whole
from recipe.dag.settings.schema import plain, tree_of, values_of
from recipe.dag.settings.typed import Typed, parse
from recipe.dag.settings.values import LOGGER, kind_of

NAME = "sft"
OWN_DATA = "pkg://recipe.dag.train.sft.data"
_MISSING = object()
_EVERY = Kind(
    "after_each_epoch, -1, or a whole number, 1 or more",
    lambda value: value in ("after_each_epoch", -1) or COUNT.accepts(value),
)
KINDS: dict[str, Kind] = {
    "seed": whole(0),
    "platform": one_of("auto", "cuda", "cpu"),
    "data.train_files": PATHS,
    "data.val_files": or_null(PATHS),
    "data.train_batch_size": COUNT,
    "data.max_length": COUNT,
    "data.truncation": one_of("drop", "right", "left", "error"),
    "data.max_token_len_per_gpu": or_null(COUNT),
    "data.micro_batch_size_per_gpu": COUNT,
    "model.use_liger": or_null(TRUTH),
    "model.fused_kernel_options.impl_backend": or_null(one_of("triton", "torch")),
    "optim.lr": NOT_NEGATIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.lr_scheduler_type": one_of("constant", "cosine"),
    "engine.strategy": one_of("fsdp2"),
    "engine.reshard_after_forward": or_null(TRUTH),
    "engine.use_no_sync_for_gradient_accumulation": or_null(TRUTH),
    "trainer.logger": LOGGER,
    "trainer.n_gpus_per_node": or_null(COUNT),
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
    "model.lora_rank": "whole models are trained; remove it",
    "model.lora_alpha": "whole models are trained; remove it",
    "model.lora_adapter_path": "whole models are trained; remove it",
    "model.target_modules": "whole models are trained; remove it",
    "model.exclude_modules": "whole models are trained; remove it",
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
    ("data.custom_cls.name", "data.custom_cls.path", OWN_DATA, "remove it, or set data.custom_cls.path to your file"),
)
"""Keys that have no effect if another key has a value: key, that key, its value, what to do."""


def compose_sft(overrides: Sequence[str], *, name: str = NAME, folder: Path | None = None) -> DictConfig:
    """Compose `name`.yaml of `folder` and apply `overrides`. Raises UserError."""
    folder = (folder or CONFIG_FOLDER).resolve()
    if not (folder / f"{name}.yaml").is_file():
        raise UserError(f"configuration: {folder / name}.yaml does not exist; see --config-path and --config-name")
    arguments = parse(overrides, [CONFIG_FOLDER, folder])
    file = compose_file(name, arguments.profiles, folder)
    if "truncation" not in file.tree.get("data", {}):
        raise UserError(f"configuration: {name}.yaml is not for verl-dag sft; start it with `defaults: [sft, _self_]`")
    defaults = values_of(compose_file(NAME, (), CONFIG_FOLDER).tree)
    changed = {key: value for key, value in values_of(file.tree).items() if value != defaults.get(key, _MISSING)}
    from_file = [Typed(key, plain(value), f"configuration: {key}={value}") for key, value in changed.items()]
    settings = [leaf for typed in arguments.settings for leaf in leaves_of(typed)]
    wrong = [message for typed in [*from_file, *settings] if (message := _refusal(typed, defaults)) is not None]
    if wrong:
        raise UserError("\nerror: ".join(wrong))
    config = file.copy()
    try:
        for typed in settings:
            OmegaConf.update(config, typed.key, typed.value, merge=True, force_add=True)
        missing = sorted(key for key, value in values_of(tree_of(config)).items() if value == "???")
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {str(error).splitlines()[0]}") from error
    if missing:
        raise UserError(f"configuration: no value for {', '.join(missing)}; pass it as {missing[0]}=...")
    if idle := [message for typed in settings if (message := _idle(typed, config)) is not None]:
        raise UserError("\nerror: ".join(idle))
    return config


def _idle(typed: Typed, config: DictConfig) -> str | None:
    """Return why a typed setting has no effect next to the others of `config`; None if it has one."""
    for key, beside, value, reason in IDLE:
        if typed.key == key and typed.value is not None and OmegaConf.select(config, beside) == value:
            return f"{typed.argument}: nothing reads it with {beside}={str(value).lower()}; {reason}"
    return None


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
