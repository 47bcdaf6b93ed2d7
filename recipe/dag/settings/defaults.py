"""Defaults for what the configuration leaves null: GPUs, tokens of a micro-batch, offload.

Invariant: `decide` is a function of the configuration, the workflow and the machine. Values that are set stay as they
are; decisions are printed when the run starts, recorded with its configuration, and do not affect learning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from omegaconf import DictConfig, open_dict

from recipe.dag.core.errors import UserError
from recipe.dag.settings.gpu_pools import (
    RUN,
    Open,
    PolicyKeys,
    default_tokens,
    is_open,
    longest_row,
    pools_of,
    useful_tokens,
)
from recipe.dag.settings.pools import plan_pools
from recipe.dag.workflow.machine import Machine
from recipe.dag.workflow.memory import GB, PoolMemory, estimate_pool, judge_pool
from recipe.dag.workflow.model_size import UnknownSize
from recipe.dag.workflow.schema import Workflow

TOKEN_CHOICES = (65536, 32768, 16384, 8192, 4096)
OFFLOADS = ("param_offload", "optimizer_offload")
HOST_BESIDE = 15 * GB
"""Host memory in bytes per policy and GPU: its trainer, its server and a share of the driver's (measured with three
policies of 3B on one GPU)."""
RAY_KILLS_AT = 0.95
"""Share of the host's memory at which Ray ends workers (`RAY_memory_usage_threshold`)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Values for what the configuration leaves null."""

    gpus: int
    """GPUs per machine."""
    tokens: int
    """Tokens of a micro-batch."""
    offload: bool | None
    """None if it cannot be decided, because the size of a model or of the GPUs is unknown."""
    memory: tuple[PoolMemory, ...] = ()
    unknown: str | None = None
    """Why the memory could not be estimated."""
    all_visible: bool = False
    """True if the configuration sets no number, so that `gpus` are all visible ones."""


def gpu_bytes(config: DictConfig, machine: Machine, gpus: int) -> int | None:
    """Return the bytes that the run may use on each GPU: those of the smallest one, at most `gpu_memory_gb`; None if
    unknown."""
    visible = min(machine.gpu_bytes[:gpus], default=None)
    limit = config.get("gpu_memory_gb")
    return min((int(number) for number in (visible, limit and limit * GB) if number), default=None)


def decide(
    config: DictConfig,
    workflow: Workflow,
    machine: Machine,
    *,
    visible: int | None = None,
) -> Decision:
    """Choose the number of GPUs (default: all `visible` ones), then the least offload and the most tokens that fit.

    Raises UserError if there is no GPU, or if there are too few for the policies.
    """
    visible = len(machine.gpu_bytes) if visible is None else visible
    configured = config.trainer.n_gpus_per_node
    if configured is None and not visible:
        raise UserError("trainer.n_gpus_per_node: no GPU is visible here; pass a number, or run on a GPU host")
    gpus = visible if configured is None else int(configured)
    longest = longest_row(config)
    tokens = default_tokens(longest)
    available = gpu_bytes(config, machine, gpus)
    decided = partial(Decision, gpus=gpus, all_visible=configured is None)
    if available is None:
        return decided(tokens=tokens, offload=None, unknown="the memory of the GPUs is unknown")
    try:
        most = useful_tokens(pools_of(config, workflow, gpus, Open(tokens, offload=False)))
    except UnknownSize as unknown:
        return decided(tokens=tokens, offload=None, unknown=str(unknown))
    for choice in _choices(config, workflow, longest, most):
        pools = pools_of(config, workflow, gpus, choice)
        if all(estimate_pool(pool, available).fits for pool in pools):
            break
    memory = tuple(judge_pool(pool, available) for pool in pools)
    return decided(tokens=choice.tokens, offload=choice.offload, memory=memory)


def _choices(config: DictConfig, workflow: Workflow, longest: int, most: int) -> Iterator[Open]:
    """Yield the possible values for null, best first. A micro-batch needs at least the `longest` row; more than `most`
    tokens are not faster."""
    sizes = [number for number in TOKEN_CHOICES if longest <= number <= most] or [longest]
    if not is_open(config, workflow, "actor.ppo_max_token_len_per_gpu"):
        sizes = sizes[:1]
    can_offload = any(is_open(config, workflow, f"actor.fsdp_config.{key}") for key in OFFLOADS)
    for offload in (False, True) if can_offload else (False,):
        for tokens in sizes:
            yield Open(tokens, offload)


def apply(config: DictConfig, decision: Decision) -> None:
    """Write a decision into the configuration where that is null."""
    with open_dict(config):
        if config.trainer.n_gpus_per_node is None:
            config.trainer.n_gpus_per_node = decision.gpus
        actor = config.actor_rollout_ref.actor
        if actor.ppo_max_token_len_per_gpu is None:
            actor.ppo_max_token_len_per_gpu = decision.tokens
        if decision.offload is None:
            return
        for engine in (actor.fsdp_config, config.critic.fsdp):
            for key in OFFLOADS:
                if engine[key] is None:
                    engine[key] = decision.offload and not engine.get("offload_policy")


def on_cpu(config: DictConfig) -> Decision:
    """Return the decision for a run without GPUs: one process per policy, nothing offloaded."""
    return Decision(gpus=1, tokens=default_tokens(longest_row(config)), offload=None)


def describe(decision: Decision, machine: Machine, config: DictConfig, *, trains: bool) -> Iterator[str]:
    """Yield lines that describe the values that `apply` has written to `config`."""
    sizes = [f"{size / GB:.1f}" for size in machine.gpu_bytes[: decision.gpus]]
    memory = f" of {' and '.join(dict.fromkeys(sizes))} GB" if sizes else ""
    all_visible = ", all that are visible" if decision.all_visible and machine.gpu_bytes else ""
    yield f"GPUs of each machine: {decision.gpus}{memory}{all_visible}"
    if trains:
        actor = config.actor_rollout_ref.actor
        offloads = [key for key in (*OFFLOADS, "offload_policy") if actor.fsdp_config.get(key)]
        size = f"{actor.ppo_max_token_len_per_gpu:,} tokens" if actor.use_dynamic_bsz else "by rows"
        yield f"micro-batches: {size}; offload: {', '.join(offloads) or 'none'}"


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


def check_servers(config: DictConfig, workflow: Workflow) -> None:
    """Raise UserError if the GPUs of a policy's pool are not a multiple of those of one server: verl would then start
    no server."""
    for pool in plan_pools(workflow, nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node):
        gpus = sum(pool.processes_on_nodes)
        for name in pool.policies:
            size = int(PolicyKeys(config, workflow, name)["rollout.tensor_model_parallel_size"])
            if gpus % size:
                raise UserError(
                    f"{RUN}.rollout.tensor_model_parallel_size={size}: servers of {size} GPUs do not fit into the "
                    f"{gpus} of policy `{name}`; see trainer.n_gpus_per_node"
                )
