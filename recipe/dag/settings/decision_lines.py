"""What a run prints of its decisions, and `plan` before it: GPUs, micro-batches, kernels and memory.

Invariant: the lines describe the values in the configuration, whether they were decided or set.
"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from recipe.dag.settings.defaults import OFFLOADS, ONCE, Decision, uses_liger
from recipe.dag.workflow.machine import Machine
from recipe.dag.workflow.memory import GB
from recipe.dag.workflow.schema import Workflow

HOST_BESIDE = 15 * GB
"""Host bytes per policy and GPU: its trainer, its server, a share of the driver (measured: three of 3B on one GPU)."""
RAY_KILLS_AT = 0.95
"""Share of the host's memory at which Ray ends workers (`RAY_memory_usage_threshold`)."""


def describe(decision: Decision, machine: Machine, config: DictConfig, workflow: Workflow) -> Iterator[str]:
    """Yield lines that describe the values that `apply` has written to `config`."""
    sizes = [f"{size / GB:.1f}" for size in machine.gpu_bytes[: decision.gpus]]
    memory = f" of {' and '.join(dict.fromkeys(sizes))} GB" if sizes else ""
    all_visible = ", all that are visible" if decision.all_visible and machine.gpu_bytes else ""
    yield f"GPUs of each machine: {decision.gpus}{memory}{all_visible}"
    if trained := workflow.trained_policies():
        actor = config.actor_rollout_ref.actor
        offloads = [key for key in (*OFFLOADS, "offload_policy") if actor.fsdp_config.get(key)]
        size = f"{actor.ppo_max_token_len_per_gpu:,} tokens" if actor.use_dynamic_bsz else "by rows"
        yield f"micro-batches: {size}; offload: {', '.join(offloads) or 'none'}"
        yield _describe_passes(config.actor_rollout_ref)
        if any(workflow.policies[name].lora for name in trained):
            where = "on the GPU" if config.rollout.keep_base else "in host memory"
            yield f"servers of adapters keep their base {where} while they sleep"


def _describe_passes(node: DictConfig) -> str:
    model = node.model
    layers = f"all layers but {model.recompute_nothing}" if model.recompute_nothing else "all layers"
    mlps = f", only the MLP in {model.recompute_mlp_only} of them" if model.recompute_mlp_only else ""
    gathered = "for each layer" if node.actor.fsdp_config.reshard_after_forward else "once a pass"
    liger = "Liger's" if uses_liger(model) else "transformers'"
    recomputed = f"{layers}{mlps}" if model.enable_gradient_checkpointing else "none"
    once = "; gradients reduced once an update" if OmegaConf.select(node, ONCE) else ""
    return f"kernels: {liger}; weights gathered {gathered}{once}; recomputed in the backward pass: {recomputed}"


def describe_memory(decision: Decision, machine: Machine) -> Iterator[str]:
    """Yield a line for each pool that says whether it fits, and what to change if it does not."""
    if decision.unknown:
        yield f"memory: not estimated ({decision.unknown})"
    for pool in decision.memory:
        yield f"{'' if pool.fits else 'warning: '}memory of {', '.join(pool.policies)} on each GPU: {pool.verdict}"
    yield from _describe_host(decision, machine)


def _describe_host(decision: Decision, machine: Machine) -> Iterator[str]:
    host = sum(pool.host for pool in decision.memory)
    if machine.host_bytes is None or not host:
        return
    beside = HOST_BESIDE * sum(len(pool.policies) * pool.gpus for pool in decision.memory)
    if host + beside > RAY_KILLS_AT * machine.host_bytes:
        yield (
            f"warning: offloading takes {host / GB:.0f} GB of host memory, and the processes about "
            f"{beside / GB:.0f}; this machine has {machine.host_bytes / GB:.0f}, and Ray ends a run at "
            f"{RAY_KILLS_AT:.0%} of it"
        )
