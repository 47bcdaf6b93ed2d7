"""Estimate of each GPU's peak memory in a run, with the configuration changes that make a run fit.

Invariant: pure arithmetic. Policies of one pool share its GPUs: their servers sample together, their trainers take
turns, and states that are not offloaded stay. An estimate, not a measurement; the fraction `RESERVE` of each GPU is
left free for its error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from recipe.dag.workflow.model_size import ModelSize
from recipe.dag.workflow.schema import Frozen
from recipe.dag.workflow.trainer_memory import (
    BF16,
    MASTER,
    Moment,
    TrainerOptions,
    host_bytes,
    resident_bytes,
    update_moments,
)

GB = 10**9
CONTEXT = 1_200_000_000
"""CUDA's context, loaded kernels and libraries' workspaces in one process (measured: an idle trainer)."""
NCCL = 400_000_000
"""Communication buffers of a process that uses several GPUs."""
SERVER_BESIDE = 1_100_000_000
"""CUDA graphs and workspaces of a server, in addition to its static share; kept while it sleeps (measured with 3B
parameters)."""
RESERVE = 0.04
"""Fraction of a GPU that is left free for the allocator's fragments and the error of the estimate."""
ACTOR = "actor_rollout_ref.actor"
FSDP = f"{ACTOR}.fsdp_config"
GPU_NUMBERS = (2, 4, 8, 16, 32)
TOKEN_NUMBERS = (8192, 4096, 2048)
SERVER_SHARES = (None, 0.4, 0.3, 0.2, 0.6, 0.7, 0.8)
"""Values that a change may set; None: unchanged."""
REFERENCE = 4
"""Bytes per parameter of a reference, which verl keeps in host memory."""


@dataclass(frozen=True, slots=True)
class PolicyOnGpu:
    """The properties of a policy that determine its GPU memory."""

    name: str
    size: ModelSize
    trainer: TrainerOptions | None
    """None for a frozen policy."""
    critic: ModelSize | None = None
    reference: bool = False
    server_share: float = 0.5
    """Fraction of the memory that is free when the servers start, before division among the pool's policies."""
    tensor_parallel: int = 1
    longest_row: int = 4096


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs and the policies that share them."""

    gpus: int
    policies: tuple[PolicyOnGpu, ...]


class Phase(Frozen):
    """Bytes on each GPU of a pool at the peak of a phase."""

    name: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    servers: int
    """Static shares of the servers: weights and KV cache."""
    processes: int
    """CUDA contexts, graphs, buffers."""

    @property
    def used(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.servers + self.processes


class PoolMemory(Frozen):
    """The estimate of one pool."""

    policies: tuple[str, ...]
    gpus: int
    available: int
    """Bytes of each GPU."""
    phases: tuple[Phase, ...]
    cache_tokens: dict[str, int]
    """Policy -> number of tokens that fit into the KV cache of one of its servers."""
    host: int
    """Bytes of host memory for what is offloaded and for references."""
    problem: str | None
    """The reason why the pool does not fit, or None."""
    change: tuple[str, ...] = ()
    """Arguments (`key=value`) that make it fit, as typed on the command line."""
    enough_gpus: int | None = None
    """The number of GPUs with which the pool would fit unchanged; None if it fits, or if no number is enough."""

    @property
    def used(self) -> int:
        return max(phase.used for phase in self.phases)

    @property
    def fits(self) -> bool:
        return self.problem is None


def estimate_pool(pool: Pool, available: int) -> PoolMemory:
    """Return the memory estimate of `pool` on GPUs with `available` bytes each."""
    shares = _server_shares(pool, available)
    phases = tuple(_phases(pool, shares))
    cache = {policy.name: _cache_tokens(policy, shares[policy.name]) for policy in pool.policies}
    return PoolMemory(
        policies=tuple(policy.name for policy in pool.policies),
        gpus=pool.gpus,
        available=available,
        phases=phases,
        cache_tokens={name: max(tokens, 0) for name, tokens in cache.items()},
        host=sum(_host(policy, pool.gpus) for policy in pool.policies),
        problem=_problem(pool, phases, cache, available),
    )


def judge_pool(pool: Pool, available: int) -> PoolMemory:
    """Return the memory estimate of `pool`, with the changes that make it fit if it does not."""
    memory = estimate_pool(pool, available)
    if memory.fits:
        return memory
    more = (number for number in GPU_NUMBERS if number > pool.gpus)
    enough = next((n for n in more if estimate_pool(replace(pool, gpus=n), available).fits), None)
    return memory.model_copy(update={"change": find_change(pool, available), "enough_gpus": enough})


def limit(available: int) -> int:
    """Return the number of bytes of a GPU that a run may use."""
    return int(available * (1 - RESERVE))


def _problem(pool: Pool, phases: Sequence[Phase], cache: dict[str, int], available: int) -> str | None:
    fullest = max(phases, key=lambda phase: phase.used)
    if fullest.used > limit(available):
        return (
            f"{fullest.name} needs {fullest.used / GB:.1f} GB of each GPU's {available / GB:.1f} "
            f"({RESERVE:.0%} are kept free)"
        )
    for policy in pool.policies:
        if cache[policy.name] < policy.longest_row:
            room = f"{max(cache[policy.name], 0):,} tokens"
            return f"the KV cache of {policy.name} has room for {room}, but a row may have {policy.longest_row:,}"
    return None


def _processes(pool: Pool) -> int:
    context = CONTEXT + (NCCL if pool.gpus > 1 else 0)
    trainers = sum(policy.trainer is not None for policy in pool.policies)
    return trainers * context + len(pool.policies) * (CONTEXT + SERVER_BESIDE)


def _server_shares(pool: Pool, available: int) -> dict[str, int]:
    """Return the bytes of each policy's static share: a fraction of the memory that is free when its server starts.
    Servers start one policy after another."""
    taken, shares = 0, {}
    for policy in pool.policies:
        if policy.trainer is not None:
            taken += CONTEXT + _at_start(policy, pool.gpus)
        share = max(available - taken - CONTEXT, 0) * policy.server_share / len(pool.policies)
        shares[policy.name] = int(share)
        taken += CONTEXT + SERVER_BESIDE
        if policy.trainer is None:  # servers of trained policies sleep until the first rollout
            taken += shares[policy.name]
    return shares


def _trainer(policy: PolicyOnGpu) -> TrainerOptions:
    assert policy.trainer is not None, policy.name  # callers pass trained policies
    return policy.trainer


def _at_start(policy: PolicyOnGpu, gpus: int) -> int:
    """Return the trainer's bytes per GPU before the first update: weights without the optimizer's state."""
    trainer = _trainer(policy)
    if trainer.offload_policy or trainer.param_offload:
        return 0
    return MASTER * _parameters(policy) // gpus


def _parameters(policy: PolicyOnGpu) -> int:
    return policy.size.parameters + (policy.critic.value_parameters if policy.critic else 0)


def _cache_tokens(policy: PolicyOnGpu, share: int) -> int:
    weights = BF16 * policy.size.parameters // policy.tensor_parallel
    return (share - weights) * policy.tensor_parallel // policy.size.cache_bytes_per_token


def _phases(pool: Pool, shares: dict[str, int]) -> Iterator[Phase]:
    processes = _processes(pool)
    trained = [policy for policy in pool.policies if policy.trainer is not None]
    frozen = sum(shares[policy.name] for policy in pool.policies if policy.trainer is None)
    weights = sum(_resident(policy, pool.gpus, weights=True) for policy in trained)
    optimizer = sum(_resident(policy, pool.gpus, weights=False) for policy in trained)
    yield Phase(
        name="rollout",
        weights=weights,
        gradients=0,
        optimizer=optimizer,
        activations=0,
        servers=sum(shares.values()),
        processes=processes,
    )
    for policy in trained:
        for learner, moments, resident in _updates(policy, pool.gpus):
            for name, moment in moments.items():
                yield Phase(
                    name=f"{name} of {learner}",
                    weights=weights - resident[0] + moment.weights,
                    gradients=moment.gradients,
                    optimizer=optimizer - resident[1] + moment.optimizer,
                    activations=moment.activations,
                    servers=frozen,
                    processes=processes,
                )


def _updates(policy: PolicyOnGpu, gpus: int) -> Iterator[tuple[str, dict[str, Moment], tuple[int, int]]]:
    """Yield (name, moments, resident bytes of weights and of the optimizer) of the actor and of the critic."""
    for critic, size in ((False, policy.size), (True, policy.critic)):
        if size is None:
            continue
        parameters = size.value_parameters if critic else size.parameters
        trainer = _trainer(policy)
        resident = (_part(parameters, gpus, trainer, weights=True), _part(parameters, gpus, trainer, weights=False))
        learner = f"{policy.name}'s critic" if critic else policy.name
        yield learner, update_moments(size, gpus, trainer, critic=critic), resident


def _resident(policy: PolicyOnGpu, gpus: int, *, weights: bool) -> int:
    return _part(_parameters(policy), gpus, _trainer(policy), weights=weights)


def _part(parameters: int, gpus: int, options: TrainerOptions, *, weights: bool) -> int:
    """Return the resident bytes per GPU of the weights, or of the optimizer's state."""
    only_this_part = replace(options, optimizer_offload=True) if weights else replace(options, param_offload=True)
    return resident_bytes(parameters, gpus, only_this_part)


def _host(policy: PolicyOnGpu, gpus: int) -> int:
    if policy.trainer is None:
        return 0
    reference = REFERENCE * policy.size.parameters if policy.reference else 0
    return reference + host_bytes(policy.size, _parameters(policy), gpus, policy.trainer)


def find_change(pool: Pool, available: int) -> tuple[str, ...]:
    """Return the smallest configuration change with which `pool` fits, as `key=value` arguments; () if none does."""
    changes = sorted(_changes(pool), key=lambda change: change[0])
    return next((lines for _, lines, changed in changes if estimate_pool(changed, available).fits), ())


def _changes(pool: Pool) -> Iterator[tuple[int, tuple[str, ...], Pool]]:
    """Yield (cost, arguments, the changed pool) of every change."""
    trained = [policy.trainer for policy in pool.policies if policy.trainer is not None]
    longest = max((policy.longest_row for policy in pool.policies if policy.trainer is not None), default=0)
    now = max((trainer.tokens for trainer in trained), default=0)
    tokens = [None, *(number for number in TOKEN_NUMBERS if longest <= number < now)]
    modes: list[tuple[int, tuple[str, ...], dict[str, bool]]] = [(0, (), {})]
    if not all(trainer.offloaded for trainer in trained):
        offload = {"param_offload": True, "optimizer_offload": True}
        modes.append((2, tuple(f"{FSDP}.{key}=true" for key in offload), offload))
    if not all(trainer.offload_policy for trainer in trained):
        # slowest: every layer is fetched from host memory, and the optimizer steps on the CPU
        modes.append((4, (f"{FSDP}.offload_policy=true",), {"offload_policy": True}))
    for (cost, lines, offload), budget, share in itertools.product(modes, tokens, SERVER_SHARES):
        more = (f"{ACTOR}.ppo_max_token_len_per_gpu={budget}",) if budget else ()
        more += (f"actor_rollout_ref.rollout.gpu_memory_utilization={share}",) if share else ()
        policies = tuple(_changed(policy, offload, budget, share) for policy in pool.policies)
        yield cost + len(more), (*lines, *more), replace(pool, policies=policies)


def _changed(policy: PolicyOnGpu, offload: dict[str, bool], tokens: int | None, share: float | None) -> PolicyOnGpu:
    trainer = policy.trainer
    if trainer is not None:
        trainer = replace(trainer, **offload, tokens=tokens or trainer.tokens)
    return replace(policy, trainer=trainer, server_share=share or policy.server_share)
