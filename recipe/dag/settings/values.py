"""The kind of value of each key of the run's configuration.

Invariant: a key's kind is its entry in `KINDS`, or else that of its default value; a key whose default is null has an
entry.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.settings.kinds import (
    ANY,
    COUNT,
    FINITE,
    LIST,
    NOT_NEGATIVE,
    PART,
    PATH,
    PATHS,
    POSITIVE,
    STRING,
    TEXT,
    TRUTH,
    ValueKind,
    names,
    one_of,
    or_null,
    whole,
)
from recipe.dag.workflow.verl_keys import RUN

TRACKERS = ("console", "tensorboard", "wandb", "swanlab", "mlflow", "clearml", "trackio", "file", "vemlp_wandb")
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""verl's estimators of the KL; with a `+` appended, the gradient is that of k2."""
EVERY = whole(1, 0, -1)
ANY_KL = one_of(*KL_TYPES, *(f"{name}+" for name in KL_TYPES))
WHOLE = ValueKind("a whole number", lambda value: type(value) is int)
_LOGGERS = names(*TRACKERS)
LOGGER = ValueKind(
    f"{_LOGGERS.takes}, or one of them",
    lambda value: value is None or value == [] or _LOGGERS.accepts([value] if isinstance(value, str) else value),
)
_CONTENTS = names("model", "optimizer", "extra", "hf_model")
_BETAS = ValueKind("two numbers [A,B]", lambda value: isinstance(value, list) and all(map(FINITE.accepts, value)))
_STRATEGY = one_of("fsdp2")
_TEXT_OR_NULL, _COUNT_OR_NULL, _TRUTH_OR_NULL = or_null(TEXT), or_null(COUNT), or_null(TRUTH)


def _optimizer(branch: str) -> dict[str, ValueKind]:
    return {
        f"{branch}.lr": NOT_NEGATIVE,
        f"{branch}.betas": _BETAS,
        f"{branch}.clip_grad": POSITIVE,
        f"{branch}.weight_decay": NOT_NEGATIVE,
        f"{branch}.lr_scheduler_type": one_of("constant", "cosine"),
        f"{branch}.warmup_style": or_null(one_of("constant", "cosine")),
        f"{branch}.min_lr_ratio": or_null(NOT_NEGATIVE),
        f"{branch}.override_optimizer_config": ANY,
    }


def _branch(model: str, engine: str, actor: str) -> dict[str, ValueKind]:
    return {
        f"{model}.hf_config_path": _TEXT_OR_NULL,
        f"{model}.external_lib": ANY,
        f"{engine}.param_offload": _TRUTH_OR_NULL,
        f"{engine}.optimizer_offload": _TRUTH_OR_NULL,
        f"{engine}.reshard_after_forward": _TRUTH_OR_NULL,
        f"{engine}.use_no_sync_for_gradient_accumulation": _TRUTH_OR_NULL,
        f"{actor}.ppo_micro_batch_size_per_gpu": _COUNT_OR_NULL,
        f"{actor}.ppo_max_token_len_per_gpu": _COUNT_OR_NULL,
        f"{actor}.strategy": _STRATEGY,
        f"{actor}.checkpoint.save_contents": _CONTENTS,
        f"{actor}.checkpoint.load_contents": _CONTENTS,
        **_optimizer(f"{actor}.optim"),
    }


KINDS: dict[str, ValueKind] = {
    "workflow": PATH,
    "seed": whole(0),
    "output_dir": PATH,
    "gpu_memory_gb": or_null(POSITIVE),
    "model_path": _TEXT_OR_NULL,
    "sandbox.url": _TEXT_OR_NULL,
    "sandbox.token": _TEXT_OR_NULL,
    "sandbox.max_concurrent": _COUNT_OR_NULL,
    "sandbox.timeout_s": POSITIVE,
    "sandbox.margin_s": NOT_NEGATIVE,
    "sandbox.memory_mb": COUNT,
    "rollout.max_in_flight": _COUNT_OR_NULL,
    "rollout.processes": ValueKind(
        "auto, or a whole number, 1 or more", lambda value: value == "auto" or COUNT.accepts(value)
    ),
    "rollout.keep_base": _TRUTH_OR_NULL,
    "report.conversations_file": _TEXT_OR_NULL,
    "report.episodes_per_step": or_null(whole(0)),
    "report.monitors": ValueKind(
        "all, or a list [...] of rules and file.py:function",
        lambda value: value == "all" or isinstance(value, list) and all(map(TEXT.accepts, value)),
    ),
    "report.on_flag": one_of("report", "mask", "stop"),
    "validation.n": COUNT,
    "validation.max_samples": or_null(WHOLE),
    "validation.temperature": or_null(FINITE),
    "validation.metrics": _TEXT_OR_NULL,
    "validation.metrics_freq": COUNT,
    "data.train_files": or_null(PATHS),
    "data.val_files": or_null(PATHS),
    "data.train_batch_size": COUNT,
    "data.max_prompt_length": COUNT,
    "data.max_response_length": COUNT,
    "data.train_max_samples": or_null(WHOLE),
    "data.val_max_samples": or_null(WHOLE),
    "data.subset.size": _COUNT_OR_NULL,
    "data.subset.seed": whole(0),
    "data.stratify_key": _TEXT_OR_NULL,
    "data.val_overlap": one_of("warn", "refuse", "allow"),
    "data.input_key": _TEXT_OR_NULL,
    "data.label_key": _TEXT_OR_NULL,
    **dict.fromkeys(("data.train_name", "data.val_name"), _TEXT_OR_NULL),
    "data.add_prompt_suffix": or_null(STRING),
    "trainer.logger": LOGGER,
    "trainer.n_gpus_per_node": _COUNT_OR_NULL,
    "trainer.nnodes": COUNT,
    "trainer.total_training_steps": COUNT,
    "trainer.total_training_tokens": _COUNT_OR_NULL,
    "trainer.save_freq": EVERY,
    "trainer.test_freq": EVERY,
    "trainer.default_local_dir": PATH,
    "trainer.resume_from_path": _TEXT_OR_NULL,
    "ray_kwargs.ray_init.address": _TEXT_OR_NULL,
    "ray_kwargs.ray_init.num_cpus": _COUNT_OR_NULL,
    "ray_kwargs.ray_init.runtime_env.py_executable": _TEXT_OR_NULL,
    **_branch(f"{RUN}.model", f"{RUN}.actor.fsdp_config", f"{RUN}.actor"),
    **_branch("critic.model", "critic.fsdp", "critic"),
    "critic.loss_scale_factor": or_null(POSITIVE),
    f"{RUN}.model.fused_kernel_options.impl_backend": or_null(one_of("triton", "torch")),
    f"{RUN}.model.use_liger": _TRUTH_OR_NULL,
    f"{RUN}.rollout.dtype": one_of("bfloat16", "float16", "float32"),
    f"{RUN}.model.enable_gradient_checkpointing": _TRUTH_OR_NULL,
    f"{RUN}.model.recompute_mlp_only": or_null(whole(0)),
    f"{RUN}.model.recompute_nothing": or_null(whole(0)),
    f"{RUN}.ref.fsdp_config.reshard_after_forward": _TRUTH_OR_NULL,
    f"{RUN}.actor.kl_loss_type": ANY_KL,
    f"{RUN}.nccl_timeout": COUNT,
    f"{RUN}.ref.strategy": _STRATEGY,
    f"{RUN}.rollout.n": COUNT,
    f"{RUN}.rollout.gpu_memory_utilization": PART,
    f"{RUN}.rollout.tensor_model_parallel_size": COUNT,
    f"{RUN}.rollout.max_model_len": _COUNT_OR_NULL,
    f"{RUN}.rollout.router_config_path": _TEXT_OR_NULL,
    f"{RUN}.rollout.quantization": _TEXT_OR_NULL,
    f"{RUN}.rollout.checkpoint_engine.custom_backend_module": _TEXT_OR_NULL,
    f"{RUN}.rollout.prometheus.served_model_name": _TEXT_OR_NULL,
}
"""Keys whose values are not exactly those of their default's type."""


def kind_of(key: str, default: Any) -> ValueKind:
    """Return the kind of a key whose default value is `default`."""
    if key in KINDS:
        return KINDS[key]
    if isinstance(default, bool):
        return TRUTH
    by_type = {int: WHOLE, float: FINITE, str: STRING, list: LIST}
    return by_type.get(type(default), ANY)
