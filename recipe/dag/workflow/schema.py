"""The workflow as a frozen, checked object.

Invariant: nothing downstream of the loader sees a dict that it must validate. Every key is declared here, an unknown
key is an error, and `0` is a value, not "unset". A superset of siiRL's schema (its workflow files).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _scalar_as_one(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class NodeType(StrEnum):
    MODEL_INFERENCE = "MODEL_INFERENCE"
    MODEL_TRAIN = "MODEL_TRAIN"
    COMPUTE = "COMPUTE"


class NodeRole(StrEnum):
    ROLLOUT = "ROLLOUT"
    REWARD = "REWARD"
    ADVANTAGE = "ADVANTAGE"
    ACTOR = "ACTOR"
    CRITIC = "CRITIC"
    REFERENCE = "REFERENCE"
    DEFAULT = "DEFAULT"


class Sampling(Frozen):
    """How a policy samples; the names are SGLang's."""

    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    repetition_penalty: float = Field(1.0, gt=0.0)
    max_tokens: int = Field(512, ge=1)
    """Per generation, in tokens."""
    ignore_eos: bool = False
    """Benchmarks only: always generate max_tokens."""


class ValidationSampling(Frozen):
    """What differs from `sampling` in validation and evaluation; what is not given stays as in training."""

    temperature: float | None = Field(None, ge=0.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = None
    max_tokens: int | None = Field(None, ge=1)


class ToolLoop(Frozen):
    """The engine parses tool calls out of each generation, runs them and lets the model go on, within one call."""

    format: Literal["hermes", "fenced"] = "hermes"
    """hermes: JSON inside <tool_call> tags. fenced: the last ```python block is the first tool's argument `code`."""
    max_generations: int = Field(8, ge=1)
    """Generations of the model in one call, the final answer included."""
    max_parallel: int = Field(1, ge=1)
    """Tool calls run from one generation; further ones are answered with an error text."""
    max_response_chars: int = Field(1024, ge=1)
    truncate: Literal["left", "middle", "right"] = "middle"


class Agent(Frozen):
    """A role. Its index in the list is its agent_group."""

    name: str
    policy: str
    sampling: Sampling = Sampling()
    validation: ValidationSampling = ValidationSampling()
    tools: tuple[str, ...] = ()
    tool_loop: ToolLoop | None = None
    """Without one, only the agent's hook calls its tools."""
    chat_template_kwargs: dict[str, Any] = {}


class Model(Frozen):
    path: str
    """A local directory or hub name; `${oc.env:NAME}` is read when the run starts."""
    tokenizer_path: str | None = None
    trust_remote_code: bool = False


class Policy(Frozen):
    """One set of weights with its tokenizer, optimizer and inference servers. Several agents may share it."""

    model: Model
    frozen: bool = False
    reference: bool = False
    """Keep a frozen copy of the initial weights for the KL loss (algorithm.kl_loss_coef)."""
    gpus: int | None = Field(None, ge=1)
    """GPUs of its own; without it the policies share all GPUs of the run."""
    config: dict[str, Any] = {}
    """Dotted or nested overrides of verl's `actor_rollout_ref` for this policy."""


class EpisodeSpec(Frozen):
    max_turns: int = Field(1, ge=1)
    timeout_s: float = Field(300.0, gt=0)
    call_timeout_s: float = Field(120.0, gt=0)
    """Per call of an agent, its generations and tool calls included."""
    generation_timeout_s: float | None = Field(None, gt=0)
    """Per try of one generation (there are three); without it, half of what is left of the call's time."""
    on_failure: Literal["retry", "mask", "drop_group", "fail"] = "retry"
    """retry: run the episode again with fresh state, then mask it. mask: leave its rows out. drop_group: leave out all
    episodes of the sample. fail: stop the run."""
    retries: int = Field(1, ge=0)
    merge_rows: bool = True
    """Calls of one agent whose prompts grow append-only become one row."""


class Algorithm(Frozen):
    estimator: Literal["grpo", "reinforce_pp"] = "grpo"
    group_by: tuple[Literal["uid", "agent", "turn", "node"], ...] = ("uid", "agent")
    stat_unit: Literal["call", "trajectory"] = "call"
    """What counts once in a group's statistics: each row, or the sum of an episode's rewards in the group."""
    center: Literal["mean", "leave_one_out"] = "mean"
    scale: Literal["std", "none"] = "std"
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    """reinforce_pp: discount per token."""
    kl_loss_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL to the reference in the actor's loss; above 0 the policy needs `reference: true`."""
    clip_ratio_low: float = Field(0.2, ge=0.0)
    clip_ratio_high: float = Field(0.2, ge=0.0)
    entropy_coef: float = 0.0
    old_log_probs: Literal["trainer", "rollout"] = "trainer"
    """What importance ratios are taken against. trainer: recomputed before the update, so that a ratio starts at 1.
    rollout: the server's own, which saves a forward pass and corrects for the server's different arithmetic."""
    epochs: int = Field(1, ge=1)
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per epoch and step of the run."""
    loss_agg: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    drop_zero_variance: bool = False
    """Leave out rows whose group has one reward only (they carry no gradient, but dilute the mean)."""


class AgentOptions(Frozen):
    process_path: str | None = None
    """`file.py` or `file.py:Class` with pre_process and post_process."""
    pre_process_kwargs: dict[str, Any] = {}
    post_process_kwargs: dict[str, Any] = {}
    obs_with_env: bool = False
    env_path: Annotated[tuple[str, ...], BeforeValidator(_scalar_as_one)] = ()
    """`file.py:Class`. A scalar is read as a list of one."""
    rewards_with_env: bool = False
    train_cycle: int | None = Field(None, ge=1)
    share_instance: int | None = Field(None, ge=0)


class Node(Frozen):
    node_id: str
    node_type: NodeType
    node_role: NodeRole = NodeRole.DEFAULT
    only_forward_compute: bool = False
    agent_group: int = Field(0, ge=0)
    dependencies: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    executable_ref: str | None = None
    """`file.py:function`."""
    executable_kwargs: dict[str, Any] = {}
    agent_options: AgentOptions = AgentOptions()
    policy: str | None = None
    """Training nodes only: the policy they act on; derived from the agent where absent."""


class Workflow(Frozen):
    """One YAML file, parsed once. `nodes` are in a topological order that keeps the file's order among equals."""

    path: str
    """The file, absolute. Paths in it are relative to its folder, then to the project's root."""
    dag_id: str
    description: str = ""
    agents: tuple[Agent, ...]
    policies: dict[str, Policy]
    episode: EpisodeSpec = EpisodeSpec()
    algorithm: Algorithm = Algorithm()
    nodes: tuple[Node, ...]
    """Rollout and reward nodes as declared, then the training chain, declared or derived."""

    def node(self, node_id: str) -> Node:
        return next(node for node in self.nodes if node.node_id == node_id)

    def of_role(self, *roles: NodeRole) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.node_role in roles)

    @property
    def rollout_nodes(self) -> tuple[Node, ...]:
        return self.of_role(NodeRole.ROLLOUT)

    @property
    def reward_nodes(self) -> tuple[Node, ...]:
        return self.of_role(NodeRole.REWARD)

    @property
    def training_nodes(self) -> tuple[Node, ...]:
        return self.of_role(NodeRole.ADVANTAGE, NodeRole.ACTOR, NodeRole.CRITIC, NodeRole.REFERENCE)

    def agent_of(self, node: Node) -> Agent:
        return self.agents[node.agent_group]

    def trained_policies(self) -> tuple[str, ...]:
        return tuple(name for name, policy in self.policies.items() if not policy.frozen)
