"""What a run takes where its configuration says null: GPUs, tokens of a micro-batch, offload.

Invariant: `decide` is a function of the configuration, the workflow and the machine. What is set is left as it is;
what was decided is printed when the run starts and recorded with its configuration. It changes nothing that is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, open_dict

from recipe.dag.errors import UserError
from recipe.dag.policy.placement import plan_pools
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
from recipe.dag.workflow.gpu_memory import GB, PoolMemory, estimate_pool, judge_pool
from recipe.dag.workflow.machine import Machine
from recipe.dag.workflow.memory_table import verdict
from recipe.dag.workflow.model_size import UnknownSize
from recipe.dag.workflow.schema import Workflow

TOKEN_CHOICES = (65536, 32768, 16384, 8192, 4096)
OFFLOADS = ("param_offload", "optimizer_offload")
HOST_BESIDE = 15 * GB
"""Bytes of host memory for each policy on each GPU: its trainer, its server and a share of the driver's (measured with
three policies of 3B on one GPU)."""
RAY_KILLS_AT = 0.95
"""Share of the host's memory at which Ray ends workers (`RAY_memory_usage_threshold`)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Values for what the configuration leaves open."""

    gpus: int
    """Of each machine."""
    tokens: int
    offload: bool | None
    """None: not known, since the size of a model or of the GPUs is not."""
    memory: tuple[PoolMemory, ...] = ()
    unknown: str | None = None
    """Why there is no estimate of the memory."""
    all_visible: bool = False


def gpu_bytes(config: DictConfig, machine: Machine, gpus: int) -> int | None:
    """Return the memory of each GPU that the run may use: of the smallest, and no more than `gpu_memory_gb`."""
    visible = min(machine.gpu_bytes[:gpus], default=None)
    limit = config.get("gpu_memory_gb")
    return min((int(number) for number in (visible, limit and limit * GB) if number), default=None)


def decide(
    config: DictConfig,
    workflow: Workflow,
    machine: Machine,
    *,
    visible: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Decision:
    """Choose the GPUs (all of the `visible` ones), then the least offload and the most tokens with which the run fits.

    Raises UserError where there is no GPU, or where they are too few for the policies.
    """
    visible = len(machine.gpu_bytes) if visible is None else visible
    asked = config.trainer.n_gpus_per_node
    if asked is None and not visible:
        raise UserError("trainer.n_gpus_per_node: no GPU is visible here; pass a number, or run on a GPU host")
    gpus = visible if asked is None else int(asked)
    longest = longest_row(config)
    tokens = default_tokens(longest)
    available = gpu_bytes(config, machine, gpus)
    chosen = {"gpus": gpus, "all_visible": asked is None}
    if available is None:
        return Decision(tokens=tokens, offload=None, unknown="no GPU's memory is known here", **chosen)
    try:
        most = useful_tokens(pools_of(config, workflow, gpus, Open(tokens, offload=False), environ))
    except UnknownSize as unknown:
        return Decision(tokens=tokens, offload=None, unknown=str(unknown), **chosen)
    for choice in _choices(config, workflow, longest, most):
        pools = pools_of(config, workflow, gpus, choice, environ)
        if all(estimate_pool(pool, available).fits for pool in pools):
            break
    memory = tuple(judge_pool(pool, available) for pool in pools)
    return Decision(tokens=choice.tokens, offload=choice.offload, memory=memory, **chosen)


def _choices(config: DictConfig, workflow: Workflow, longest: int, most: int) -> Iterator[Open]:
    """Yield what may stand in for null, best first: `most` tokens are of use, and a row may have `longest`."""
    sizes = [number for number in TOKEN_CHOICES if longest <= number <= most] or [longest]
    if not is_open(config, workflow, "actor.ppo_max_token_len_per_gpu"):
        sizes = sizes[:1]
    can_offload = any(is_open(config, workflow, f"actor.fsdp_config.{key}") for key in OFFLOADS)
    for offload in (False, True) if can_offload else (False,):
        for tokens in sizes:
            yield Open(tokens, offload)


def apply(config: DictConfig, decision: Decision) -> None:
    """Write a decision into the configuration, where that says null."""
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
    """Yield, in words, what `config` leaves to the machine and now says, after `apply`."""
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
    """Yield a line for each pool: whether it fits, and what to change where it does not."""
    if decision.unknown:
        yield f"memory: not estimated ({decision.unknown})"
    for pool in decision.memory:
        yield f"{'' if pool.fits else 'warning: '}memory of {', '.join(pool.policies)} on each GPU: {verdict(pool)}"
    yield from _describe_host(decision, machine)


def _describe_host(decision: Decision, machine: Machine) -> Iterator[str]:
    host = sum(pool.host for pool in decision.memory)
    if machine.host_bytes is None or not host:
        return
    beside = HOST_BESIDE * sum(len(pool.policies) * pool.gpus for pool in decision.memory)
    if host + beside > RAY_KILLS_AT * machine.host_bytes:
        yield (
            f"warning: what is offloaded takes {host / GB:.0f} GB of host memory, and the processes about "
            f"{beside / GB:.0f}; this machine has {machine.host_bytes / GB:.0f}, and Ray ends a run at "
            f"{RAY_KILLS_AT:.0%} of it"
        )


def check_servers(config: DictConfig, workflow: Workflow) -> None:
    """Raise UserError where a policy's servers, of several GPUs each, do not divide the GPUs of its pool: verl would
    start none."""
    for share in plan_pools(workflow, nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node):
        gpus = sum(share.processes_on_nodes)
        for name in share.policies:
            size = int(PolicyKeys(config, workflow, name)["rollout.tensor_model_parallel_size"])
            if gpus % size:
                raise UserError(
                    f"{RUN}.rollout.tensor_model_parallel_size={size}: servers of {size} GPUs do not fit into the "
                    f"{gpus} of policy `{name}`; see trainer.n_gpus_per_node"
                )
