"""Estimate of a run's memory before anything is started: of the models' states, and of each GPU at its peaks, with the
configuration changes that make a run fit.

Invariant: arithmetic on the sizes of models. Policies of one pool share its GPUs: their servers sample together, their
trainers take turns, and states that are not offloaded stay. An estimate, not a measurement; the fraction `RESERVE` of
each GPU is left free for its error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from recipe.dag.core.errors import UserError
from recipe.dag.core.frozen import Frozen
from recipe.dag.workflow.adapter_memory import adapter_parameters, critic_path
from recipe.dag.workflow.model_size import ModelSize, UnknownSize, size_of
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.trainer_memory import (
    ADAM,
    BF16,
    GRADIENT,
    MASTER,
    Phase,
    TrainerOptions,
    host_bytes,
    resident_bytes,
    update_phases,
)

GB = 10**9
CONTEXT = 1_200_000_000
"""CUDA's context, loaded kernels and libraries' workspaces in one process (measured: an idle trainer)."""
BARE_CONTEXT = 500_000_000
"""The part of it that a trainer has before it loads a model: those of a pool start beside its first policy."""
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
SERVER_SHARES = (0.4, 0.3, 0.2, 0.6, 0.7, 0.8)
"""Values that a change may set, in the order in which they are tried."""
OFFLOADS = ((), ("param_offload", "optimizer_offload"), ("offload_policy",))
"""The keys that a change may set, fastest first: with the last, every layer is fetched from host memory, and the
optimizer steps on the CPU."""
REFERENCE = 4
"""Bytes per parameter of a reference, which verl keeps in host memory."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes per parameter of the optimizers' moments of a policy and its critic."""

    actor: float = ADAM
    critic: float = ADAM


class PolicyMemory(Frozen):
    """Bytes of a policy's states over all its devices; None if the model's size is unknown."""

    policy: str
    parameters: int | None
    unknown: str = ""
    """The reason why the size is unknown."""
    weights: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    reference: int | None = None
    critic: int | None = None
    """Weights, gradients and optimizer of its own critic; 0 without one."""
    serving: int | None = None
    """Weights in each replica of the server."""

    @property
    def parts(self) -> tuple[int | None, ...]:
        return (self.weights, self.gradients, self.optimizer, self.reference, self.critic, self.serving)

    @property
    def total(self) -> int | None:
        sizes = [part for part in self.parts if part is not None]
        return sum(sizes) if len(sizes) == len(self.parts) else None


def estimate_states(
    workflow: Workflow, environ: Mapping[str, str] | None = None, *, moments: Mapping[str, Moments] = {}
) -> tuple[PolicyMemory, ...]:
    """Estimate the states of each policy, from the models' config.json files if they are on this machine. `moments`: by
    policy; those of Adam in fp32 for others."""
    names = workflow.local_policies()
    states = {name: _states(workflow, name, environ, moments.get(name, Moments())) for name in names}
    for base in names:
        states |= _adapter_states(workflow, base, environ)
    return tuple(states[name] for name in workflow.policies if name in states)


def _states(workflow: Workflow, name: str, environ: Mapping[str, str] | None, moments: Moments) -> PolicyMemory:
    policy, critic = workflow.policies[name], critic_path(workflow, name)
    try:
        size = size_of(policy.model.path, environ)
        values = size_of(critic, environ).value_parameters if critic is not None else 0
    except UnknownSize as unknown:
        return PolicyMemory(policy=name, parameters=None, unknown=str(unknown))
    trained = 0 if policy.frozen else size.parameters
    as_base = size.parameters * BF16 if policy.frozen and workflow.trained_on(name) else 0
    return PolicyMemory(
        policy=name,
        parameters=size.parameters,
        weights=trained * MASTER + as_base,
        gradients=trained * GRADIENT,
        optimizer=int(trained * moments.actor),
        reference=trained * REFERENCE if policy.reference else 0,
        critic=values * (MASTER + GRADIENT) + int(values * moments.critic),
        serving=size.parameters * BF16,
    )


def _adapter_states(workflow: Workflow, base: str, environ: Mapping[str, str] | None) -> dict[str, PolicyMemory]:
    """Return the states of the adapters on a policy's model."""
    try:
        size = size_of(workflow.policies[base].model.path, environ)
        sizes = {name: adapter_parameters(workflow, name, size) for name in workflow.adapters_of(base)}
    except (UnknownSize, UserError) as unknown:
        names = workflow.adapters_of(base)
        return {name: PolicyMemory(policy=name, parameters=None, unknown=str(unknown)) for name in names}
    states = {}
    for name, (parameters, critic) in sizes.items():
        trained = 0 if workflow.policies[name].frozen else parameters
        states[name] = PolicyMemory(
            policy=name,
            parameters=parameters,
            weights=trained * MASTER,
            gradients=trained * GRADIENT,
            optimizer=trained * ADAM,
            reference=0,
            critic=critic * (MASTER + GRADIENT + ADAM),
            serving=parameters * BF16,
        )
    return states


@dataclass(frozen=True, slots=True)
class Learner:
    """A model that is trained: the actor of a policy or, with a value head, its critic."""

    name: str
    size: ModelSize
    options: TrainerOptions
    critic: bool = False

    @property
    def parameters(self) -> int:
        return self.size.value_parameters if self.critic else self.size.parameters


@dataclass(frozen=True, slots=True)
class PolicyOnGpu:
    """The properties of a policy that determine its GPU memory."""

    name: str
    size: ModelSize
    trainer: TrainerOptions | None
    """None for a frozen policy."""
    critic: ModelSize | None = None
    critic_moments: float = ADAM
    """Bytes per parameter of the critic's optimizer."""
    reference: bool = False
    keeps_weights: bool = False
    """Its servers keep their weights on the GPU while they sleep."""
    server_share: float = 0.5
    """Fraction of the memory that is free when the servers start, before division among the pool's policies."""
    tensor_parallel: int = 1
    served: int = 0
    """Bytes of the adapters on it that its servers hold."""
    longest_row: int = 4096

    def learners(self) -> Iterator[Learner]:
        """Yield what is trained: the actor and its critic; nothing of a frozen policy."""
        if self.trainer is not None:
            yield Learner(self.name, self.size, self.trainer)
            if self.critic is not None:
                options = replace(self.trainer, moments=self.critic_moments)
                yield Learner(f"{self.name}'s critic", self.critic, options, critic=True)


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs and the policies that share them."""

    gpus: int
    policies: tuple[PolicyOnGpu, ...]


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

    @property
    def verdict(self) -> str:
        """One line: whether the pool fits, and the changes that make it fit if it does not."""
        if self.fits:
            return f"fits: {self.used / GB:.1f} of {self.available / GB:.1f} GB"
        ways = [f"pass {' '.join(self.change)}"] if self.change else []
        ways += [f"give it {self.enough_gpus} GPUs"] if self.enough_gpus else []
        return f"does not fit: {self.problem}; {', or '.join(ways) or 'use a smaller model'}"


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
    taken, shares = BARE_CONTEXT * sum(policy.trainer is not None for policy in pool.policies), {}
    for policy in pool.policies:
        if policy.trainer is not None:  # the optimizer's state comes with the first update
            taken += CONTEXT - BARE_CONTEXT + _resident(policy, pool.gpus)[0]
        share = max(available - taken - CONTEXT, 0) * policy.server_share / len(pool.policies)
        shares[policy.name] = int(share)
        taken += CONTEXT + SERVER_BESIDE
        if policy.trainer is None:  # servers of trained policies sleep until the first rollout
            taken += shares[policy.name]
    return shares


def _cache_tokens(policy: PolicyOnGpu, share: int) -> int:
    return (
        (share - _served_weights(policy) - policy.served) * policy.tensor_parallel // policy.size.cache_bytes_per_token
    )


def _served_weights(policy: PolicyOnGpu) -> int:
    return BF16 * policy.size.parameters // policy.tensor_parallel


def _asleep(policy: PolicyOnGpu, share: int) -> int:
    """Return the bytes of a server's share that it keeps while policies train."""
    if policy.trainer is None:  # servers of frozen policies never sleep
        return share
    return policy.served + (_served_weights(policy) if policy.keeps_weights else 0)


def _phases(pool: Pool, shares: dict[str, int]) -> Iterator[Phase]:
    processes = _processes(pool)
    resident = [_resident(policy, pool.gpus) for policy in pool.policies]
    weights, optimizer = (sum(part) for part in zip(*resident, strict=True))
    rollout = sum(shares.values())
    yield Phase(name="rollout", weights=weights, optimizer=optimizer, servers=rollout, processes=processes)
    asleep = sum(_asleep(policy, shares[policy.name]) for policy in pool.policies)
    for policy in pool.policies:
        for learner in policy.learners():
            own_weights, own_optimizer = resident_bytes(learner.parameters, pool.gpus, learner.options)
            for phase in update_phases(learner.size, pool.gpus, learner.options, critic=learner.critic):
                together = {
                    "name": f"{phase.name} of {learner.name}",
                    "weights": weights - own_weights + phase.weights,
                    "optimizer": optimizer - own_optimizer + phase.optimizer,
                    "servers": asleep,
                    "processes": processes,
                }
                yield phase.model_copy(update=together)


def _resident(policy: PolicyOnGpu, gpus: int) -> tuple[int, int]:
    """Return the bytes of weights and of optimizers that stay on each GPU between updates."""
    parts = [resident_bytes(learner.parameters, gpus, learner.options) for learner in policy.learners()]
    return sum(weights for weights, _ in parts), sum(optimizer for _, optimizer in parts)


def _host(policy: PolicyOnGpu, gpus: int) -> int:
    reference = REFERENCE * policy.size.parameters if policy.reference and policy.trainer is not None else 0
    learners = policy.learners()
    return reference + sum(host_bytes(policy.size, each.parameters, gpus, each.options) for each in learners)


def find_change(pool: Pool, available: int) -> tuple[str, ...]:
    """Return the first configuration change with which `pool` fits, as `key=value` arguments; () if none does. A change
    of numbers is tried before any offload, and of one number before two."""
    longest = max((policy.longest_row for policy in pool.policies if policy.trainer is not None), default=0)
    tokens = [number for number in TOKEN_NUMBERS if number >= longest]
    numbers: list[tuple[int | None, float | None]] = [(None, None)]
    numbers += [*product([None], SERVER_SHARES), *product(tokens, [None]), *product(tokens, SERVER_SHARES)]
    for offload, (budget, share) in product(OFFLOADS, numbers):
        policies = tuple(_changed(policy, offload, budget, share) for policy in pool.policies)
        if estimate_pool(replace(pool, policies=policies), available).fits:
            lines = [f"{FSDP}.{key}=true" for key in offload]
            lines += [f"{ACTOR}.ppo_max_token_len_per_gpu={budget}"] if budget else []
            lines += [f"actor_rollout_ref.rollout.gpu_memory_utilization={share}"] if share else []
            return tuple(lines)
    return ()


def _changed(policy: PolicyOnGpu, offload: tuple[str, ...], tokens: int | None, share: float | None) -> PolicyOnGpu:
    trainer = policy.trainer
    if trainer is not None:
        trainer = replace(trainer, **dict.fromkeys(offload, True), tokens=tokens or trainer.tokens)
    return replace(policy, trainer=trainer, server_share=share or policy.server_share)
