"""The workflow as a frozen, checked object, with loops and votes.

Invariant: nothing downstream of the loader sees a dict that it must validate. Every key is declared here, an unknown
key is an error, and `0` is a value, not "unset".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.catalogue import DEFAULT, make_algorithm
from recipe.dag.core.frozen import Frozen, Mark
from recipe.dag.core.problem import Problem
from recipe.dag.workflow.agent_schema import Agent, Policy, ToolSpec, as_tuple
from recipe.dag.workflow.condition import Condition
from recipe.dag.workflow.node_kinds import EPISODE_ROLES, TRAINING_ROLES, NodeRole, NodeType


def _algorithm(value: Any) -> Any:
    return make_algorithm(**value) if isinstance(value, dict) else value


AnyAlgorithm = Annotated[SerializeAsAny[Algorithm], BeforeValidator(_algorithm)]
"""An algorithm, as an object of its estimator's class."""


class EpisodeSpec(Frozen):
    """Settings of episodes: turns, time limits, and the handling of failures."""

    max_turns: int = Field(default=1, ge=1)
    """Maximum number of passes through the graph of nodes."""
    train_turns: Literal["all", "last"] = "all"
    """The turns whose calls become training rows."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Time limit of an episode, in seconds."""
    call_timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of one call of an agent, including its generations and tool calls, in seconds."""
    generation_timeout_s: float | None = Field(default=None, gt=0)
    """Time limit of each of the three attempts at a generation, in seconds; by default half of the call's remaining
    time."""
    on_failure: Literal["retry", "mask", "drop_group", "fail"] = "retry"
    """Handling of a failed episode. retry: run it again with fresh state, then mask it. mask: exclude its rows.
    drop_group: exclude all episodes of the sample. fail: stop the run."""
    on_user_error: Annotated[Literal["fail", "mask"], Mark.UNLEARNED] = "fail"
    """Handling of an error in the user's code: a hook, env, tool or reward that raises or returns an invalid value
    (timeouts and lost connections are not such errors). fail: stop the run. mask: exclude the episode, or with
    `on_failure: drop_group` its sample, without a retry."""
    max_masked: Annotated[float, Mark.UNLEARNED] = Field(default=0.5, gt=0, le=1)
    """Stop the run if failures exclude more than this fraction of a batch's episodes; 1: never. Batches of fewer than
    16 episodes are not checked."""
    retries: int = Field(default=1, ge=0)
    """Maximum number of times that a failed episode is run again."""
    merge_rows: bool = True
    """Merge calls of one agent into one row if each prompt continues the tokens of the call before."""


class AgentOptions(Frozen):
    """Options of a rollout node: its hooks and its environment."""

    process_path: Annotated[str | None, Mark.CODE] = None
    """The hooks: `file.py`, or `file.py:Class` with `pre_process` and `post_process`."""
    pre_process_kwargs: dict[str, Any] = {}
    """Keyword arguments of the hook that makes the prompt."""
    post_process_kwargs: dict[str, Any] = {}
    """Keyword arguments of the hook that parses the output."""
    obs_with_env: bool = False
    """Show the environment's observation to the agent; its output becomes part of the action."""
    env_path: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Mark.CODE_OR_NAME] = ()
    """The environment that the node steps: `file.py:Class`, or a name under `envs`. If this is a list of several,
    `env_route` selects the one of an episode."""
    env_route: str | None = None
    """A dotted path into the sample (`data_source`, `extra_info.env`) whose value names one entry of `env_path`."""
    rewards_with_env: bool = False
    """Reward the episode with the environment's rewards."""


class EnvSpec(Frozen):
    """A named environment class."""

    path: Annotated[str, Mark.CODE]
    """The user's class: `file.py:Class`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the class."""


class Loop(Frozen):
    """Nodes that run repeatedly, in rounds, within one turn. In each round they see the results of the round before;
    nodes outside that depend on one of them wait for the last round. A round that ends the episode, or in which all
    nodes were skipped, is the last."""

    nodes: tuple[str, ...]
    """The ids of the nodes that are repeated."""
    max_rounds: int = Field(ge=1)
    """Maximum number of rounds per turn."""
    until: Condition | None = None
    """A condition, checked after every round, that ends the loop early."""


class Vote(Frozen):
    """Options of a VOTE node, which selects the most frequent `parsed[key]` of its dependencies. Its result is
    `parsed = {key: winner, share: 0..1, votes: {...}}`."""

    key: str = "answer"
    """The entry of `parsed` that is counted."""
    ties: Literal["first", "none"] = "first"
    """first: among equals, the value of the node that comes first in `dependencies` wins. none: a tie has no winner."""


class Candidates(Frozen):
    """Several answers to one prompt, of which one is kept. All of them are trained on."""

    k: int = Field(ge=2)
    """Number of candidates."""
    by: Annotated[str, Mark.CODE_OR_NAME] = Field(min_length=1)
    """What scores a candidate: `file.py:function`, called as `function(context)` with the candidate as `context.call`,
    which returns a number or None; or a rollout or compute node that depends on this node alone, which then runs once
    for each candidate."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    key: str = "score"
    """The entry of the node's `parsed` that is the score."""
    keep: Literal["best", "first"] = "best"
    """best: the one with the highest score, of equals the first. first: the first one, whatever the scores."""
    validation_k: int | None = Field(default=None, ge=1)
    """Number of candidates in validation and evaluation; by default `k`."""


class Node(Frozen):
    """A node of the graph: an agent's call, a vote, a function, or a training step."""

    node_id: str = Field(min_length=1)
    """The node's unique name."""
    node_type: Annotated[NodeType, Mark.UNLEARNED]
    """The type of computation; it follows from the role and is not needed."""
    node_role: NodeRole = NodeRole.DEFAULT
    """The role of the node. In the short form it follows from the key `agent`, `reward`, `vote` or `compute`."""
    only_forward_compute: bool = False
    """Training nodes only: compute log-probs or values without an update."""
    agent_group: int = Field(default=0, ge=0)
    """The index of the node's agent in `agents`."""
    dependencies: tuple[str, ...] = ()
    """The ids of the nodes that must finish before this one starts."""
    config: dict[str, Any] = {}
    """Dotted or nested overrides of verl's configuration for the policy (or critic) of this node."""
    executable_ref: Annotated[str | None, Mark.CODE] = None
    """The user's function: `file.py:function`."""
    executable_kwargs: Annotated[dict[str, Any], Mark.CODE] = {}
    """Keyword arguments of the function."""
    scope: Literal["episode", "group"] = "episode"
    """Reward nodes only: what the function scores. episode: a finished episode. group: all finished episodes of a
    sample at once."""
    agent_options: AgentOptions = AgentOptions()
    when: Condition | None = None
    """Nodes of the episode only: skip the node if this is false. A node is also skipped if all of its dependencies
    were skipped."""
    vote: Vote | None = None
    candidates: Candidates | None = None
    """Rollout nodes only: generate several answers, and go on with one of them."""
    policy: str | None = None
    """Training nodes only: the policy they act on; by default the agent's."""


class SubWorkflow(Frozen):
    """An entry of `nodes` that inserts the rollout, vote and compute nodes of another workflow file, with their loops
    and envs. Its ids become `<node_id>__<id>`; its agents are matched to the agents of this file by name."""

    node_id: str = Field(min_length=1)
    """The prefix of the inserted nodes' ids."""
    workflow: str
    """The other file, relative to this file's folder or to the project's root."""
    agents: dict[str, str] = {}
    """Agents with other names in this file: name in the other file -> name in this file."""
    dependencies: tuple[str, ...] = ()
    """The ids of the nodes that must finish before the inserted ones start."""


class Workflow(Frozen):
    """A parsed workflow file. `nodes` are in topological order, and in the file's order among equals."""

    path: Annotated[str, Mark.UNLEARNED]
    """The absolute path of the file. Paths in it are relative to its folder, then to the project's root."""
    dag_id: Annotated[str, Mark.UNLEARNED]
    description: Annotated[str, Mark.UNLEARNED] = ""
    agents: tuple[Agent, ...]
    policies: dict[str, Policy]
    tools: Annotated[dict[str, ToolSpec], Mark.UNLEARNED] = {}
    """The declared tools; `agents` hold them with what an agent overrides."""
    envs: dict[str, EnvSpec] = {}
    episode: EpisodeSpec = EpisodeSpec()
    loops: dict[str, Loop] = {}
    algorithm: AnyAlgorithm = DEFAULT()
    nodes: tuple[Node, ...]
    """The declared nodes, and the training chain, declared or derived."""
    edited: str | None = Field(default=None, exclude=True)
    """The file's text after edits from the command line (`workflow.<key>=VALUE`); None without edits."""
    warnings: Annotated[tuple[Problem, ...], Mark.UNLEARNED] = ()
    """Settings whose effect may differ from the author's intention, to be printed before a run starts."""

    def node(self, node_id: str) -> Node:
        """Return the node with this id. Raises StopIteration if it does not exist."""
        return next(node for node in self.nodes if node.node_id == node_id)

    def of_role(self, *roles: NodeRole) -> tuple[Node, ...]:
        """Return the nodes that have one of these roles."""
        return tuple(node for node in self.nodes if node.node_role in roles)

    @property
    def rollout_nodes(self) -> tuple[Node, ...]:
        return self.of_role(NodeRole.ROLLOUT)

    @property
    def episode_nodes(self) -> tuple[Node, ...]:
        """Nodes that run inside a turn: rollout, vote and compute nodes, without reward nodes."""
        return self.of_role(*EPISODE_ROLES)

    @property
    def reward_nodes(self) -> tuple[Node, ...]:
        return self.of_role(NodeRole.REWARD)

    @property
    def training_nodes(self) -> tuple[Node, ...]:
        return self.of_role(*TRAINING_ROLES)

    def agent_of(self, node: Node) -> Agent:
        return self.agents[node.agent_group]

    def trained_policies(self) -> tuple[str, ...]:
        return tuple(name for name, policy in self.policies.items() if not policy.frozen)

    def local_policies(self) -> tuple[str, ...]:
        """Return the policies whose weights the run itself loads."""
        return tuple(name for name, policy in self.policies.items() if policy.api is None)

    def critic_owner(self, policy: str) -> str | None:
        """Return the policy whose critic evaluates this policy's rows: itself, or the one whose critic it shares."""
        critic = self.policies[policy].critic
        return None if critic is None else critic.share or policy
