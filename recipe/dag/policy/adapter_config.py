"""The configuration of a host of adapters, made from those of its base and its adapters.

Invariant: the trainer's settings are those of the adapters, which agree except for what `TrainedAdapter` holds; the
servers' are those of the base, with room for every adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.dag.core.errors import UserError
from recipe.dag.policy import sglang_adapters
from recipe.dag.workflow.adapter_shape import ALL_LINEAR, AdapterShape, columns_of, critic_shape
from recipe.dag.workflow.agent_schema import Policy

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""SGLang's name for all of them, `all`, would also take memory for adapters of the embeddings."""


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """An adapter that a host trains: the actor of a policy, or its critic."""

    name: str
    shape: AdapterShape
    optim: Any
    """verl's configuration of its optimizer, as a dict or as verl's object."""
    start: str | None = None
    """The PEFT folder to start at."""
    critic: dict[str, Any] | None = None
    """verl's configuration of a critic, which has a value head; None for an actor."""


def critic_of(name: str) -> str:
    """Return the name of the critic's adapter, which is its folder in a checkpoint, too."""
    return f"{name}/critic"


def trained_adapters(
    name: str, policy: Policy, shape: AdapterShape, config: DictConfig, start: str | None
) -> Iterator[TrainedAdapter]:
    """Yield what is trained of an adapter policy: its actor and, if it has one of its own, its critic."""
    actor = OmegaConf.to_container(config.actor_rollout_ref.actor.optim, resolve=True)
    yield TrainedAdapter(name, shape, actor, start)
    if policy.critic is not None and policy.critic.share is None:
        critic: Any = OmegaConf.to_container(config.critic, resolve=True)
        yield TrainedAdapter(critic_of(name), critic_shape(shape, policy.critic), critic["optim"], start, critic)


def host_config(
    configs: Mapping[str, DictConfig],
    base: str,
    trained: Sequence[TrainedAdapter],
    shapes: Mapping[str, AdapterShape],
    *,
    platform: str,
) -> DictConfig:
    """Return the host's configuration.

    configs: of the base and its adapters
    shapes: of all adapters

    Raises UserError.
    """
    config = configs[trained[0].name if trained else base].copy()
    rollout = config.actor_rollout_ref.rollout
    for adapter in trained:
        if (optimizer := adapter.optim["optimizer"]).endswith("8bit"):
            actor = adapter.critic is None
            where, key = (base, "actor.optim") if actor else (adapter.name.replace("/", "."), "optim")
            raise UserError(
                f"policies.{where}.config: {key}.optimizer={optimizer} is for whole weights; adapters are small: set "
                f"{key}.optimizer=AdamW and {key}.optimizer_impl=torch.optim there"
            )
    with open_dict(config):
        rollout.custom = {
            "policy": base,
            "keeps_weights": bool(trained and config.rollout.keep_base),
            "adapter_columns": sum(columns_of(shape.rank) for shape in shapes.values()),
        }
        rollout.max_model_len = max(each.actor_rollout_ref.rollout.max_model_len for each in configs.values())
        rollout.load_format = "auto"  # the servers load the base themselves
        if platform != "cpu":
            engine = config.actor_rollout_ref.actor.fsdp_config
            engine.model_dtype = "bf16"  # of the frozen base; adapters are fp32
            own = rollout.engine_kwargs.get("sglang") or {}
            backend = own.get("lora_backend", sglang_adapters.NAME)
            eager = rollout.enforce_eager or own.get("disable_cuda_graph")
            graphs = backend == sglang_adapters.NAME and own.get("enable_breakable_cuda_graph", not eager)
            chosen = {"lora_backend": backend, "enable_breakable_cuda_graph": graphs}
            rollout.engine_kwargs.sglang = {**own, **_server_arguments(shapes), **chosen}
    return config


def _server_arguments(shapes: Mapping[str, AdapterShape]) -> dict[str, object]:
    """Return the arguments with which SGLang serves adapters. Raises UserError for targets that it cannot serve."""
    for name, shape in shapes.items():
        if shape.targets != (ALL_LINEAR,) and (message := _unserved(set(shape.targets))):
            raise UserError(f"policies.{name}.lora.targets: {message}")
    return {
        "enable_lora": True,
        "max_lora_rank": max(shape.rank for shape in shapes.values()),
        "lora_target_modules": list(TARGETS),
        "max_loras_per_batch": len(shapes) + 1,  # the base takes a place, too
        # not skipped with a warning: weights that fit no layer
        "lora_strict_loading": True,
        # no sync replaces the base when a server wakes up
        "enable_weights_cpu_backup": True,
    }


def _unserved(targets: set[str]) -> str | None:
    """Return why SGLang cannot serve an adapter of these layers, which it computes in groups; None if it can."""
    if unknown := sorted(targets - set(TARGETS)):
        return f"SGLang serves no adapter of {unknown[0]}; write all-linear, or names out of {', '.join(TARGETS)}"
    if targets & {"q_proj", "k_proj", "v_proj"} and not {"q_proj", "v_proj"} <= targets:
        return "SGLang serves q_proj, k_proj and v_proj together; add q_proj and v_proj"
    if targets & {"gate_proj", "up_proj"} and not {"gate_proj", "up_proj"} <= targets:
        return "SGLang serves gate_proj and up_proj together; add the other one"
    return None
