"""The GPU pools of a run, as input of the memory estimate.

Invariant: a policy's own `config` overrides the run's, as it does in the run. Values for null keys are an argument, so
that a choice can be tried before it is made. Reads only the models' config.json files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.dag.settings.pools import plan_pools
from recipe.dag.workflow.flatten import flatten
from recipe.dag.workflow.memory import PolicyOnGpu, Pool, critic_path
from recipe.dag.workflow.model_size import context_of, size_of
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.trainer_memory import Head, TrainerOptions

RUN = "actor_rollout_ref"
TOKENS = 16384
"""Default tokens of a micro-batch."""
TOKENS_OF_SMALL_MODELS = ((250_000_000, 65536), (1_000_000_000, 32768))
"""(upper bound of the parameters, tokens): with few tokens, the kernels of a small model finish before the CPU has
launched the next ones. In examples/bench_training.py on an H100, updates of 135M parameters reach 29,400 tokens/s at
16,384 tokens and 88,000 at 65,536; those of 0.5B reach 40,600 at 16,384 and 54,400 at 32,768."""


@dataclass(frozen=True, slots=True)
class Open:
    """Values for keys that the configuration leaves null."""

    tokens: int
    offload: bool


def longest_row(config: DictConfig) -> int:
    """Return the maximum number of tokens in a row, prompt and response together."""
    data = config.data
    return int(_select(config, f"{RUN}.rollout.max_model_len") or data.max_prompt_length + data.max_response_length)


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


def useful_tokens(pools: tuple[Pool, ...]) -> int:
    """Return the tokens of a micro-batch above which the largest trained model does not get faster."""
    trained = [policy for pool in pools for policy in pool.policies if policy.trainer is not None]
    largest = max((policy.size.parameters for policy in trained), default=0)
    return next((tokens for parameters, tokens in TOKENS_OF_SMALL_MODELS if largest < parameters), TOKENS)


def pools_of(config: DictConfig, workflow: Workflow, gpus: int, choice: Open) -> tuple[Pool, ...]:
    """Return the pools of a run on `gpus` GPUs per machine. Raises UserError if there are too few for the policies, and
    UnknownSize if a model's shape is unknown."""
    specs = plan_pools(workflow, nnodes=config.trainer.nnodes, n_gpus_per_node=gpus)
    return tuple(
        Pool(
            sum(spec.processes_on_nodes),
            tuple(_policy(config, workflow, name, choice) for name in spec.policies),
        )
        for spec in specs
    )


def is_open(config: DictConfig, workflow: Workflow, key: str) -> bool:
    """Return whether a key below `actor_rollout_ref` is null for a trained policy, so that a choice has an effect."""
    return any(PolicyKeys(config, workflow, name)[key] is None for name in workflow.trained_policies())


class PolicyKeys:
    """A policy's keys below `actor_rollout_ref`: those of its own `config` override the run's."""

    def __init__(self, config: DictConfig, workflow: Workflow, name: str):
        self.run = config
        self.own = {key: value for key, value, _ in flatten(workflow.policies[name].config)}

    def __getitem__(self, key: str) -> Any:
        return self.own[key] if key in self.own else _select(self.run, f"{RUN}.{key}")


def _select(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key, default=None)


def _policy(config: DictConfig, workflow: Workflow, name: str, choice: Open) -> PolicyOnGpu:
    policy, keys = workflow.policies[name], PolicyKeys(config, workflow, name)
    critic = critic_path(workflow, name)
    return PolicyOnGpu(
        name=name,
        size=size_of(policy.model.path),
        trainer=None if policy.frozen else _trainer(keys, longest_row(config), choice),
        critic=None if critic is None else size_of(critic),
        reference=policy.reference,
        server_share=float(keys["rollout.gpu_memory_utilization"] or 0.5),
        tensor_parallel=int(keys["rollout.tensor_model_parallel_size"] or 1),
        longest_row=served_length(config, workflow, name),
    )


def _trainer(keys: PolicyKeys, longest: int, choice: Open) -> TrainerOptions:
    if keys["actor.use_dynamic_bsz"] is False:
        tokens = int(keys["actor.ppo_micro_batch_size_per_gpu"] or 1) * longest
    else:
        tokens = int(keys["actor.ppo_max_token_len_per_gpu"] or choice.tokens)
    offload = {
        key: choice.offload if (value := keys[f"actor.fsdp_config.{key}"]) is None else bool(value)
        for key in ("param_offload", "optimizer_offload")
    }
    return TrainerOptions(
        tokens=tokens,
        **offload,
        offload_policy=bool(keys["actor.fsdp_config.offload_policy"]),
        head=_head(keys),
        checkpointing=keys["model.enable_gradient_checkpointing"] is not False,
    )


def _head(keys: PolicyKeys) -> Head:
    if keys["model.use_remove_padding"] is False:
        return Head.PADDED
    cut = max(int(keys[f"actor.{key}ulysses_sequence_parallel_size"] or 1) for key in ("", "fsdp_config."))
    if cut > 1 or keys["actor.fsdp_config.pad_to_length"]:
        return Head.PACKED
    if not keys["model.use_fused_kernels"]:
        return Head.LOGITS
    return Head.CHUNKED if keys["model.fused_kernel_options.impl_backend"] == "torch" else Head.FUSED
