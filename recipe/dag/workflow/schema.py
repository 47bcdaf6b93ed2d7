"""The workflow as a frozen, checked object.

Invariant: nothing downstream of the loader sees a dict that it must validate. Every key is declared here, an unknown
key is an error, and `0` is a value, not "unset". A superset of siiRL's schema (its workflow files).
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.grpo import Grpo
from recipe.dag.workflow.blocks import Frozen, Model
from recipe.dag.workflow.flow import Condition, Loop, Vote
from recipe.dag.workflow.problem import Problem


def _scalar_as_one(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _of_its_estimator(value: Any) -> Any:
    return make_algorithm(**value) if isinstance(value, dict) else value


AnyAlgorithm = Annotated[SerializeAsAny[Algorithm], BeforeValidator(_of_its_estimator)]
"""An object of the estimator's class."""
StopStrings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_scalar_as_one)]


class NodeType(StrEnum):
    MODEL_INFERENCE = "MODEL_INFERENCE"
    MODEL_TRAIN = "MODEL_TRAIN"
    COMPUTE = "COMPUTE"


class NodeRole(StrEnum):
    ROLLOUT = "ROLLOUT"
    VOTE = "VOTE"
    REWARD = "REWARD"
    ADVANTAGE = "ADVANTAGE"
    ACTOR = "ACTOR"
    CRITIC = "CRITIC"
    REFERENCE = "REFERENCE"
    DEFAULT = "DEFAULT"


EPISODE_ROLES = (NodeRole.ROLLOUT, NodeRole.VOTE, NodeRole.DEFAULT)
"""Roles of the nodes that run inside a turn of an episode."""


class Sampling(Frozen):
    """How a policy samples; the names are SGLang's."""

    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Tokens less probable than this share of the most probable one are left out."""
    repetition_penalty: float = Field(1.0, gt=0.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Taken off the logit of each token that the generation holds already."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """The same, once for each time that it occurs."""
    stop: StopStrings = ()
    """Texts that end a generation; they stay in it, as they were sampled."""
    max_tokens: int = Field(512, ge=1)
    """Per generation, in tokens."""
    ignore_eos: bool = False
    """Benchmarks only: always generate max_tokens."""


class ValidationSampling(Frozen):
    """What differs from `sampling` in validation and evaluation; what is not given stays as in training."""

    temperature: float | None = Field(None, ge=0.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    stop: StopStrings | None = None
    max_tokens: int | None = Field(None, ge=1)


class ToolSpec(Frozen):
    """A tool: a built-in one, one under `tools`, or the user's own."""

    name: str | None = None
    """A built-in tool, or one under `tools`. Models call a tool by the name in its schema."""
    path: str | None = None
    """`file.py:Class`"""
    kwargs: dict[str, Any] = {}
    """Of its constructor; of a built-in tool, its options."""

    @property
    def key(self) -> str:
        """Agents whose tools have the same key share one instance."""
        return str(self) + (json.dumps(self.kwargs, sort_keys=True, default=str) if self.kwargs else "")

    def __str__(self) -> str:
        return self.path or self.name or ""


def _tool_by_name(value: Any) -> Any:
    """`code_interpreter` or `file.py:Class` stands for a tool without options."""
    if not isinstance(value, str):
        return value
    return ToolSpec(path=value) if ":" in value else ToolSpec(name=value)


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

    name: str = Field(min_length=1)
    policy: str
    role: str | None = None
    """What `algorithm.group_by: [role]` pools agents by; the name where absent."""
    sampling: Sampling = Sampling()
    validation: ValidationSampling = ValidationSampling()
    tools: tuple[Annotated[ToolSpec, BeforeValidator(_tool_by_name)], ...] = ()
    """A list of names, of `file.py:Class`, or of mappings with name or path, and kwargs."""
    tool_loop: ToolLoop | None = None
    """Without one, only the agent's hook calls its tools."""
    memory: Literal["none", "chat"] = "none"
    """none: every call has a prompt of its own. chat: in an episode each node of the agent keeps its conversation as
    token ids and only appends what was said since, so that its calls become one row."""
    chat_template_kwargs: dict[str, Any] = {}


class Critic(Frozen):
    """A value model with an optimizer of its own, on its policy's devices."""

    model: Model | None = None
    """Its first weights, under a fresh value head; the policy's model where absent."""
    share: str | None = None
    """Use the critic of this policy instead of one's own: one network, trained on the rows of all who share it."""
    lr: float | None = Field(None, gt=0.0)
    cliprange_value: float = Field(0.5, gt=0.0)
    """How far a value may move from the one before the update, in units of the return."""
    epochs: int = Field(1, ge=1)
    mini_batches: int = Field(1, ge=1)
    config: dict[str, Any] = {}
    """Dotted or nested overrides of verl's `critic`."""


class Policy(Frozen):
    """One set of weights with its tokenizer, optimizer and inference servers. Several agents may share it."""

    model: Model
    frozen: bool = False
    critic: Critic | None = None
    lr: float | None = Field(None, gt=0.0)
    """Of the actor; the run's (actor_rollout_ref.actor.optim.lr) where absent."""
    train_cycle: int | None = Field(None, ge=1)
    """Policies that have one take turns: in step s (from 0) the k-th of the n that have one updates its actor if
    (s // train_cycle) % n == k. Critics always learn."""
    reference: bool = False
    """Keep a frozen copy of the initial weights for the KL loss (algorithm.kl_loss_coef)."""
    gpus: int | None = Field(None, ge=1)
    """GPUs of its own; without it the policies share all GPUs of the run."""
    config: dict[str, Any] = {}
    """Dotted or nested overrides of verl's `actor_rollout_ref` for this policy."""


class EpisodeSpec(Frozen):
    max_turns: int = Field(1, ge=1)
    train_turns: Literal["all", "last"] = "all"
    """Which turns' calls become rows (siiRL's use_all_traj)."""
    timeout_s: float = Field(300.0, gt=0)
    call_timeout_s: float = Field(120.0, gt=0)
    """Per call of an agent, its generations and tool calls included."""
    generation_timeout_s: float | None = Field(None, gt=0)
    """Per try of one generation (there are three); without it, half of what is left of the call's time."""
    on_failure: Literal["retry", "mask", "drop_group", "fail"] = "retry"
    """retry: run the episode again with fresh state, then mask it. mask: leave its rows out. drop_group: leave out all
    episodes of the sample. fail: stop the run."""
    on_user_error: Literal["fail", "mask"] = "fail"
    """What an error of the user's code does (a hook, env, tool or reward that raises or returns what it must not;
    timeouts and lost connections are none). fail: stop the run. mask: leave the episode out, or with `on_failure:
    drop_group` its sample; it is not retried."""
    max_masked: float = Field(0.5, gt=0, le=1)
    """Stop the run where a larger share of a batch's episodes is lost to faults; 1: never. Batches of fewer than 16
    episodes are not judged."""
    retries: int = Field(1, ge=0)
    merge_rows: bool = True
    """Calls of one agent whose prompts grow append-only become one row."""


class AgentOptions(Frozen):
    process_path: str | None = None
    """`file.py` or `file.py:Class` with pre_process and post_process."""
    pre_process_kwargs: dict[str, Any] = {}
    post_process_kwargs: dict[str, Any] = {}
    obs_with_env: bool = False
    env_path: Annotated[tuple[str, ...], BeforeValidator(_scalar_as_one)] = ()
    """`file.py:Class`, or the name of one under `envs`. A scalar is read as a list of one. With several, env_route says
    which one an episode gets."""
    env_route: str | None = None
    """A dotted path into the sample (`data_source`, `extra_info.env`) whose value names one of `env_path`."""
    rewards_with_env: bool = False


class EnvSpec(Frozen):
    """An environment class under a name."""

    path: str
    """`file.py:Class`"""
    kwargs: dict[str, Any] = {}
    """Of its constructor."""


class Node(Frozen):
    node_id: str = Field(min_length=1)
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
    when: Condition | None = None
    """Nodes of the episode: skip it where this is false. A node all of whose dependencies were skipped is skipped, too.
    """
    vote: Vote | None = None
    policy: str | None = None
    """Training nodes only: the policy they act on; derived from the agent where absent."""


class SubWorkflow(Frozen):
    """In the place of a node: the rollout, vote and compute nodes of another workflow file, with their loops and envs.
    Its ids become `<node_id>__<id>`; its agents are the ones of this file that are called the same."""

    node_id: str = Field(min_length=1)
    workflow: str
    """The file, looked up like all others."""
    agents: dict[str, str] = {}
    """Agents of that file that are called differently here: `{theirs: ours}`."""
    dependencies: tuple[str, ...] = ()


class Workflow(Frozen):
    """One YAML file, parsed once. `nodes` are in a topological order that keeps the file's order among equals."""

    path: str
    """The file, absolute. Paths in it are relative to its folder, then to the project's root."""
    dag_id: str
    description: str = ""
    agents: tuple[Agent, ...]
    policies: dict[str, Policy]
    envs: dict[str, EnvSpec] = {}
    episode: EpisodeSpec = EpisodeSpec()
    loops: dict[str, Loop] = {}
    algorithm: AnyAlgorithm = Grpo()
    nodes: tuple[Node, ...]
    """Rollout and reward nodes as declared, then the training chain, declared or derived."""
    edited: str | None = Field(None, exclude=True)
    """The file's text with what the command line set in it (`workflow.<key>=VALUE`); None where it set nothing."""
    warnings: tuple[Problem, ...] = ()
    """What the file says and a run does otherwise than its author may think; to be shown before it starts."""

    def node(self, node_id: str) -> Node:
        return next(node for node in self.nodes if node.node_id == node_id)

    def of_role(self, *roles: NodeRole) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.node_role in roles)

    @property
    def rollout_nodes(self) -> tuple[Node, ...]:
        return self.of_role(NodeRole.ROLLOUT)

    @property
    def episode_nodes(self) -> tuple[Node, ...]:
        """What runs inside a turn: rollout, vote and compute nodes, but no scoring."""
        return self.of_role(*EPISODE_ROLES)

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

    def critic_owner(self, policy: str) -> str | None:
        """The policy whose critic values this one's rows: itself, or the one that it shares with."""
        critic = self.policies[policy].critic
        return None if critic is None else critic.share or policy
