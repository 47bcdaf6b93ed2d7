"""Defaults for what the configuration leaves null: GPUs, tokens of a micro-batch, offload, gathered weights, recompute,
kernels, context of the servers.

Invariant: `decide` is a function of the configuration, the workflow, the machine and the models' config.json files.
Values that are set stay as they are, a policy's own `config` before the run's; decisions are printed when the run
starts, recorded with its configuration, and do not affect learning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.dag.core.errors import UserError
from recipe.dag.core.flatten import flatten
from recipe.dag.settings.pools import plan_pools
from recipe.dag.workflow.adapter_memory import adapter_parameters, critic_path, served_adapters
from recipe.dag.workflow.machine import Machine
from recipe.dag.workflow.memory import GB, Moments, PolicyOnGpu, Pool, PoolMemory, estimate_pool, judge_pool
from recipe.dag.workflow.model_size import UnknownSize, context_of, size_of
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.trainer_memory import Head, TrainerOptions, moment_bytes
from recipe.dag.workflow.verl_keys import RUN

TOKENS = 16384
"""Default tokens of a micro-batch."""
TOKENS_OF_SMALL_MODELS = ((250_000_000, 65536), (1_000_000_000, 32768))
"""(upper bound of the parameters, tokens): with few tokens, the kernels of a small model finish before the CPU has
launched the next ones. In examples/bench_training.py on an H100, updates of 135M parameters reach 29,400 tokens/s at
16,384 tokens and 88,000 at 65,536; those of 0.5B reach 40,600 at 16,384 and 54,400 at 32,768."""
TOKEN_CHOICES = (65536, 32768, 16384, 8192, 4096)
OFFLOADS = ("param_offload", "optimizer_offload")
RESHARD = "actor.fsdp_config.reshard_after_forward"
ONCE = "actor.fsdp_config.use_no_sync_for_gradient_accumulation"
OFFLOAD_POLICY = "actor.fsdp_config.offload_policy"
LIGER = "model.use_liger"
RECOMPUTE = "model.enable_gradient_checkpointing"
MLP_ONLY, NOTHING = "model.recompute_mlp_only", "model.recompute_nothing"
SPARE = 0.1
"""Share of a GPU that stays free when layers keep more activations: speed alone should not fill a GPU."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Values for what the configuration leaves null."""

    gpus: int
    """GPUs per machine."""
    tokens: int
    """Tokens of a micro-batch."""
    offload: bool | None
    """None if it cannot be decided, because the size of a model or of the GPUs is unknown."""
    reshard: bool = True
    """Free a layer's gathered weights after its forward pass."""
    checkpointing: bool = True
    """Layers recompute their activations in the backward pass."""
    mlp_only: int = 0
    """Layers that recompute their MLP only, in every model."""
    nothing: int = 0
    """Layers beside these that recompute nothing."""
    reduce_once: bool = False
    """Gradients are reduced after an update's last micro-batch, and whole until then, on any number of GPUs."""
    keep_base: bool = False
    """Sleeping servers keep the base of adapters on the GPU."""
    memory: tuple[PoolMemory, ...] = ()
    unknown: str | None = None
    """Why the memory could not be estimated."""
    all_visible: bool = False
    """True if the configuration sets no number, so that `gpus` are all visible ones."""


class PolicyKeys:
    """A policy's keys below `actor_rollout_ref`: those of its own `config` override the run's."""

    def __init__(self, config: DictConfig, workflow: Workflow, name: str):
        self.run = config
        self.own = {key: value for key, value, _ in flatten(workflow.policies[name].config)}

    def __getitem__(self, key: str) -> Any:
        return self.own[key] if key in self.own else OmegaConf.select(self.run, f"{RUN}.{key}")


def moments_of(config: DictConfig, workflow: Workflow, name: str) -> Moments:
    """Return the sizes of the optimizers' moments of a policy and of its critic."""
    critic = workflow.policies[name].critic
    own = {} if critic is None else {key: value for key, value, _ in flatten(critic.config)}
    of_critic = own.get("optim.optimizer", config.critic.optim.optimizer)
    return Moments(*map(moment_bytes, (PolicyKeys(config, workflow, name)["actor.optim.optimizer"], of_critic)))


def longest_row(config: DictConfig) -> int:
    """Return the maximum number of tokens in a row, prompt and response together."""
    data = config.data
    return int(config[RUN].rollout.max_model_len or data.max_prompt_length + data.max_response_length)


def served_length(config: DictConfig, workflow: Workflow, name: str) -> int:
    """Return the context of a policy's servers in tokens: `max_model_len`, or else the longest row and, within what
    the model was made for, the thoughts that come on top."""
    if written := PolicyKeys(config, workflow, name)["rollout.max_model_len"]:
        return int(written)
    longest = longest_row(config)
    thoughts = max((a.sampling.thinking_tokens for a in workflow.agents if a.policy == name), default=0)
    most = context_of(workflow.policies[name].model.path) if thoughts else None
    return longest + thoughts if most is None else max(longest, min(longest + thoughts, most))


def default_tokens(longest: int) -> int:
    """Return the tokens of a micro-batch if neither the configuration nor the memory determines them."""
    return max(TOKENS, longest)


def decide(config: DictConfig, workflow: Workflow, machine: Machine, *, visible: int | None = None) -> Decision:
    """Choose the number of GPUs (default: all `visible` ones), then the least offload, the most tokens, whether
    gathered weights stay, the least recompute and the fewest reductions of gradients that fit.

    Raises UserError if there is no GPU, or if there are too few for the policies.
    """
    visible = len(machine.gpu_bytes) if visible is None else visible
    configured = config.trainer.n_gpus_per_node
    if configured is None and not visible:
        raise UserError("trainer.n_gpus_per_node: no GPU is visible here; pass a number, or run on a GPU host")
    gpus = visible if configured is None else int(configured)
    longest = longest_row(config)
    available = _gpu_bytes(config, machine, gpus)
    decision = Decision(gpus=gpus, tokens=default_tokens(longest), offload=None, all_visible=configured is None)
    if available is None:
        return replace(decision, unknown="the memory of the GPUs is unknown")
    try:
        most = useful_tokens(_pools(config, workflow, decision))
    except UnknownSize as unknown:
        return replace(decision, unknown=str(unknown))
    for offload, tokens, reshard in _choices(config, workflow, longest, most):
        decision = replace(decision, offload=offload, tokens=tokens, reshard=reshard)
        if _fits(config, workflow, decision, available):
            break
    if not config[RUN].model.enable_activation_offload:  # verl's, which recomputes whole layers itself
        decision = _with_least_recompute(config, workflow, decision, available)
    decision = _with_kept_base(config, workflow, decision, available)
    once = replace(decision, reduce_once=True)
    if not any(PolicyKeys(config, workflow, name)[OFFLOAD_POLICY] for name in workflow.trained_policies()):
        decision = once if _leaves_spare(config, workflow, once, available) else decision
    if decision.mlp_only and _is_open(config, workflow, RECOMPUTE) and _train_alone(config, workflow, decision):
        decision = _with_most_layers(config, workflow, decision, available, "nothing")
    return replace(decision, memory=tuple(judge_pool(pool, available) for pool in _pools(config, workflow, decision)))


def _with_kept_base(config: DictConfig, workflow: Workflow, decision: Decision, available: int) -> Decision:
    """Return `decision` with servers that keep the base of adapters on the GPU, if it fits, if need be beside three
    quarters of the tokens: copying a base to the host and back takes longer than smaller micro-batches do."""
    choices = _or_smaller(config, workflow, replace(decision, keep_base=True))
    return next((each for each in choices if _fits(config, workflow, each, available)), decision)


def _or_smaller(config: DictConfig, workflow: Workflow, decision: Decision) -> list[Decision]:
    """Return `decision`, and the same with three quarters of the tokens if a row and the configuration allow it."""
    smaller = replace(decision, tokens=decision.tokens * 3 // 4)
    is_open = _is_open(config, workflow, "actor.ppo_max_token_len_per_gpu")
    return [decision, smaller] if is_open and smaller.tokens >= longest_row(config) else [decision]


def _fits(config: DictConfig, workflow: Workflow, decision: Decision, available: int) -> bool:
    return all(estimate_pool(pool, available).fits for pool in _pools(config, workflow, decision))


def _with_least_recompute(config: DictConfig, workflow: Workflow, decision: Decision, available: int) -> Decision:
    """Return `decision` with no recompute if that leaves `SPARE` free, or else of MLPs only in as many layers as do.
    For adapters, recompute is a third of all work, and three quarters of the tokens without it are faster."""
    policies = [PolicyKeys(config, workflow, name) for name in workflow.trained_policies()]
    less = {keys[key] for keys in policies for key in (MLP_ONLY, NOTHING)}
    if _is_open(config, workflow, RECOMPUTE) and less == {None}:
        adapters = all(workflow.policies[name].lora is not None for name in workflow.trained_policies())
        for each in _or_smaller(config, workflow, replace(decision, checkpointing=False))[: 1 + adapters]:
            if _leaves_spare(config, workflow, each, available):
                return each
    return _with_most_layers(config, workflow, decision, available, "mlp_only")


def _leaves_spare(config: DictConfig, workflow: Workflow, decision: Decision, available: int) -> bool:
    memories = [estimate_pool(pool, available) for pool in _pools(config, workflow, decision)]
    return all(memory.fits for memory in memories) and _updates_leave_spare(memories, available)


def _updates_leave_spare(memories: list[PoolMemory], available: int) -> bool:
    phases = [phase for memory in memories for phase in memory.phases if phase.name.startswith("backward")]
    return all(phase.used <= available * (1 - SPARE) for phase in phases)


def _train_alone(config: DictConfig, workflow: Workflow, decision: Decision) -> bool:
    """Return whether no two policies train on a GPU: what torch caches for one of them, no estimate knows."""
    pools = _pools(config, workflow, decision)
    return all(sum(policy.trainer is not None for policy in pool.policies) <= 1 for pool in pools)


def _with_most_layers(
    config: DictConfig, workflow: Workflow, decision: Decision, available: int, field: str
) -> Decision:
    """Return `decision` with as many layers of each model in its `field`, mlp_only or nothing, as leave `SPARE` free in
    updates, if that number is open. A model with fewer layers has all of them there."""
    pools = _pools(config, workflow, decision)
    trained = [(policy.size, policy.trainer) for pool in pools for policy in pool.policies if policy.trainer]
    layers = max((size.layers - options.nothing for size, options in trained if options.checkpointing), default=0)

    def is_too_many(count: int) -> bool:
        pools = _pools(config, workflow, replace(decision, **{field: count}))
        return not _updates_leave_spare([estimate_pool(pool, available) for pool in pools], available)

    is_open = _is_open(config, workflow, f"model.recompute_{field}")
    count = bisect_left(range(1, layers + 1), True, key=is_too_many) if is_open else 0
    decision = replace(decision, **{field: count})
    return replace(decision, mlp_only=max(min(decision.mlp_only, layers - decision.nothing), 0))


def _gpu_bytes(config: DictConfig, machine: Machine, gpus: int) -> int | None:
    """Return the bytes that the run may use on each GPU: those of the smallest one, at most `gpu_memory_gb`; None if
    unknown."""
    visible = min(machine.gpu_bytes[:gpus], default=None)
    limit = config.get("gpu_memory_gb")
    return min((int(number) for number in (visible, limit and limit * GB) if number), default=None)


def _choices(config: DictConfig, workflow: Workflow, longest: int, most: int) -> Iterator[tuple[bool, int, bool]]:
    """Yield the possible values of (offload, tokens, reshard) for null, best first. A micro-batch needs at least the
    `longest` row; more than `most` tokens are not faster."""
    sizes = [number for number in TOKEN_CHOICES if longest <= number <= most] or [longest]
    if not _is_open(config, workflow, "actor.ppo_max_token_len_per_gpu"):
        sizes = sizes[:1]
    can_offload = any(_is_open(config, workflow, f"actor.fsdp_config.{key}") for key in OFFLOADS)
    return product((False, True) if can_offload else (False,), sizes, (False, True))


def _is_open(config: DictConfig, workflow: Workflow, key: str) -> bool:
    """Return whether a key below `actor_rollout_ref` is null for a trained policy, so that a choice has an effect."""
    return any(PolicyKeys(config, workflow, name)[key] is None for name in workflow.trained_policies())


def useful_tokens(pools: tuple[Pool, ...]) -> int:
    """Return the tokens of a micro-batch above which the largest trained model does not get faster."""
    largest = max((policy.size.parameters for pool in pools for policy in pool.policies if policy.trainer), default=0)
    return next((tokens for parameters, tokens in TOKENS_OF_SMALL_MODELS if largest < parameters), TOKENS)


def _pools(config: DictConfig, workflow: Workflow, decision: Decision) -> tuple[Pool, ...]:
    """Return the pools of a run with the values of `decision` for null. Raises UserError if there are too few GPUs for
    the policies, and UnknownSize if a model's shape is unknown."""
    specs = plan_pools(workflow, nnodes=config.trainer.nnodes, n_gpus_per_node=decision.gpus)
    policy = partial(_policy, config, workflow, decision)
    return tuple(Pool(sum(spec.processes_on_nodes), tuple(map(policy, spec.policies))) for spec in specs)


def _policy(config: DictConfig, workflow: Workflow, decision: Decision, name: str) -> PolicyOnGpu:
    policy, keys = workflow.policies[name], PolicyKeys(config, workflow, name)
    critic, moments = critic_path(workflow, name), moments_of(config, workflow, name)
    trained, size, keep = workflow.trained_on(name), size_of(policy.model.path), config.rollout.keep_base
    trainer = _trainer(keys, longest_row(config), decision, moments.actor) if trained else None
    if trainer is not None and policy.frozen:
        trainer = replace(trainer, adapters=sum(sum(adapter_parameters(workflow, each, size)) for each in trained))
    return PolicyOnGpu(
        name=name,
        size=size,
        trainer=trainer,
        critic=None if critic is None else size_of(critic),
        critic_moments=moments.critic,
        reference=policy.reference is not None,
        keeps_weights=bool(trained) and policy.frozen and bool(decision.keep_base if keep is None else keep),
        server_share=float(keys["rollout.gpu_memory_utilization"] or 0.5),
        tensor_parallel=int(keys["rollout.tensor_model_parallel_size"] or 1),
        served=served_adapters(workflow, name, size, keys["rollout.engine_kwargs.sglang.lora_backend"]),
        longest_row=served_length(config, workflow, name),
    )


def _trainer(keys: PolicyKeys, longest: int, decision: Decision, moments: float) -> TrainerOptions:
    if keys["actor.use_dynamic_bsz"] is False:
        tokens = int(keys["actor.ppo_micro_batch_size_per_gpu"] or 1) * longest
    else:
        tokens = int(keys["actor.ppo_max_token_len_per_gpu"] or decision.tokens)
    decided = dict.fromkeys((f"actor.fsdp_config.{key}" for key in OFFLOADS), bool(decision.offload))
    decided |= {RESHARD: decision.reshard, LIGER: liger_is_installed()}
    decided |= {RECOMPUTE: decision.checkpointing, ONCE: decision.reduce_once}
    decided |= {MLP_ONLY: decision.mlp_only, NOTHING: decision.nothing}
    values = {key: value if (written := keys[key]) is None else written for key, value in decided.items()}
    return TrainerOptions(
        tokens=tokens,
        **{key: bool(values[f"actor.fsdp_config.{key}"]) for key in OFFLOADS},
        offload_policy=bool(keys[OFFLOAD_POLICY]),
        head=_head(keys),
        checkpointing=bool(values[RECOMPUTE]),
        mlp_only=int(values[MLP_ONLY]),
        nothing=int(values[NOTHING]),
        liger=bool(values[LIGER]),
        reshard=bool(values[RESHARD]),
        reduce_once=bool(values[ONCE]),
        moments=moments,
    )


def uses_liger(model: DictConfig) -> bool:
    """Return whether a model of this configuration gets Liger's kernels on a GPU, if they know its family."""
    return liger_is_installed() if model.use_liger is None else bool(model.use_liger)


def liger_is_installed() -> bool:
    return find_spec("liger_kernel") is not None


def _head(keys: PolicyKeys) -> Head:
    if keys["model.use_remove_padding"] is False:
        return Head.PADDED
    cut = max(int(keys[f"actor.{key}ulysses_sequence_parallel_size"] or 1) for key in ("", "fsdp_config."))
    if cut > 1 or keys["actor.fsdp_config.pad_to_length"]:
        return Head.PACKED
    if not keys["model.use_fused_kernels"]:
        return Head.LOGITS
    return Head.CHUNKED if keys["model.fused_kernel_options.impl_backend"] == "torch" else Head.FUSED


def apply(config: DictConfig, decision: Decision) -> None:
    """Write a decision into the configuration where that is null."""
    node = config.actor_rollout_ref
    with open_dict(config):
        _fill(config.trainer, n_gpus_per_node=decision.gpus)
        _fill(config.rollout, keep_base=decision.keep_base)
        _fill(node.actor, ppo_max_token_len_per_gpu=decision.tokens)
        _fill(node.model, enable_gradient_checkpointing=decision.checkpointing)
        _fill(node.model, recompute_mlp_only=decision.mlp_only, recompute_nothing=decision.nothing)
        for engine in (node.actor.fsdp_config, config.critic.fsdp):
            if decision.offload is not None:
                _fill(engine, **dict.fromkeys(OFFLOADS, decision.offload and not engine.get("offload_policy")))
            # null leaves it to the number of a policy's processes
            once = True if decision.reduce_once else None
            _fill(engine, reshard_after_forward=decision.reshard, use_no_sync_for_gradient_accumulation=once)


def _fill(node: DictConfig, **values: Any) -> None:
    for key, value in values.items():
        if node[key] is None:
            node[key] = value


def on_cpu(config: DictConfig) -> Decision:
    """Return the decision for a run without GPUs: one process per policy, nothing offloaded."""
    tokens = default_tokens(longest_row(config))
    return Decision(gpus=1, tokens=tokens, offload=None, reshard=False, checkpointing=False)


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
