"""Defaults for what the configuration leaves null: GPUs, tokens of a micro-batch, offload, gathered weights, recompute,
kernels, context of the servers.

Invariant: `decide` is a function of the configuration, the workflow, the machine and the models' config.json files.
Values that are set stay as they are, a policy's own `config` before the run's; decisions are printed when the run
starts, recorded with its configuration, and do not affect learning.
"""

from __future__ import annotations

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
from recipe.dag.workflow.trainer_memory import Head, TrainerOptions, mlp_only_bytes, moment_bytes
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
MLP_ONLY = "model.recompute_mlp_only"
SPARE = 0.1
"""Share of a GPU that stays free when layers keep more activations: speed alone should not fill a GPU."""
HOST_BESIDE = 15 * GB
"""Host bytes per policy and GPU: its trainer, its server, a share of the driver (measured: three of 3B on one GPU)."""
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
    reshard: bool = True
    """Free a layer's gathered weights after its forward pass."""
    checkpointing: bool = True
    """Layers recompute their activations in the backward pass."""
    mlp_only: int = 0
    """Layers that recompute their MLP only, in every model."""
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
    mlp_only = {PolicyKeys(config, workflow, name)[MLP_ONLY] for name in workflow.trained_policies()}
    if _is_open(config, workflow, RECOMPUTE) and mlp_only == {None}:
        adapters = all(workflow.policies[name].lora is not None for name in workflow.trained_policies())
        for each in _or_smaller(config, workflow, replace(decision, checkpointing=False))[: 1 + adapters]:
            if _leaves_spare(config, workflow, each, available):
                return each
    if None not in mlp_only:
        return decision
    rooms = (_room_for_mlp_only(pool, available) for pool in _pools(config, workflow, decision))
    return replace(decision, mlp_only=min(rooms, default=0))


def _leaves_spare(config: DictConfig, workflow: Workflow, decision: Decision, available: int) -> bool:
    memories = [estimate_pool(pool, available) for pool in _pools(config, workflow, decision)]
    phases = [phase for memory in memories for phase in memory.phases if phase.name.startswith("backward")]
    return all(memory.fits for memory in memories) and all(p.used <= available * (1 - SPARE) for p in phases)


def _room_for_mlp_only(pool: Pool, available: int) -> int:
    """Return the number of layers that may keep what only recomputing their MLP requires, in every model of `pool`."""
    phases = {phase.name: phase.used for phase in estimate_pool(pool, available).phases}
    counts = []
    for policy in pool.policies:
        if policy.trainer is not None:
            room = available * (1 - SPARE) - phases[f"backward of {policy.name}"]
            layers = int(room // mlp_only_bytes(policy.size, policy.trainer)) if policy.trainer.checkpointing else 0
            counts.append(max(0, min(layers, policy.size.layers)))
    return min(counts, default=0)


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
    decided |= {RECOMPUTE: decision.checkpointing, MLP_ONLY: decision.mlp_only, ONCE: decision.reduce_once}
    values = {key: value if (written := keys[key]) is None else written for key, value in decided.items()}
    return TrainerOptions(
        tokens=tokens,
        **{key: bool(values[f"actor.fsdp_config.{key}"]) for key in OFFLOADS},
        offload_policy=bool(keys[OFFLOAD_POLICY]),
        head=_head(keys),
        checkpointing=bool(values[RECOMPUTE]),
        mlp_only=int(values[MLP_ONLY]),
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
    offload = decision.offload
    with open_dict(config):
        if config.trainer.n_gpus_per_node is None:
            config.trainer.n_gpus_per_node = decision.gpus
        if config.rollout.keep_base is None:
            config.rollout.keep_base = decision.keep_base
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        if actor.ppo_max_token_len_per_gpu is None:
            actor.ppo_max_token_len_per_gpu = decision.tokens
        if model.enable_gradient_checkpointing is None:
            model.enable_gradient_checkpointing = decision.checkpointing
        if model.recompute_mlp_only is None:
            model.recompute_mlp_only = decision.mlp_only
        for engine in (actor.fsdp_config, config.critic.fsdp):
            # null leaves it to the number of a policy's processes
            once = True if decision.reduce_once else None
            values = {"reshard_after_forward": decision.reshard, "use_no_sync_for_gradient_accumulation": once}
            if offload is not None:
                values |= dict.fromkeys(OFFLOADS, offload and not engine.get("offload_policy"))
            for key, value in values.items():
                if engine[key] is None:
                    engine[key] = value


def on_cpu(config: DictConfig) -> Decision:
    """Return the decision for a run without GPUs: one process per policy, nothing offloaded."""
    tokens = default_tokens(longest_row(config))
    return Decision(gpus=1, tokens=tokens, offload=None, reshard=False, checkpointing=False)


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
    mlps = f", only the MLP in {model.recompute_mlp_only} of them" if model.recompute_mlp_only else ""
    gathered = "for each layer" if node.actor.fsdp_config.reshard_after_forward else "once a pass"
    liger = "Liger's" if uses_liger(model) else "transformers'"
    recomputed = f"all layers{mlps}" if model.enable_gradient_checkpointing else "none"
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
