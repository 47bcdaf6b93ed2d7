"""The workflow as a frozen, checked object, with its envs, loops and settings of episodes.

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
from recipe.dag.workflow.agent_schema import Agent, Policy, ToolSpec, critic_owners
from recipe.dag.workflow.condition import Condition
from recipe.dag.workflow.node import EPISODE_KINDS, TRAINING_KINDS, Kind, Node


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
    """Merge calls of one policy into one row if each prompt continues the tokens of the call before."""


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
        return next(node for node in self.nodes if node.id == node_id)

    def of_kind(self, *kinds: Kind) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind in kinds)

    @property
    def rollout_nodes(self) -> tuple[Node, ...]:
        return self.of_kind(Kind.ROLLOUT)

    @property
    def episode_nodes(self) -> tuple[Node, ...]:
        """Nodes that run inside a turn: rollout, vote and compute nodes, without reward nodes."""
        return self.of_kind(*EPISODE_KINDS)

    @property
    def reward_nodes(self) -> tuple[Node, ...]:
        return self.of_kind(Kind.REWARD)

    @property
    def training_nodes(self) -> tuple[Node, ...]:
        return self.of_kind(*TRAINING_KINDS)

    def agent_of(self, node: Node) -> Agent:
        return next(agent for agent in self.agents if agent.name == node.agent)

    def policies_of(self, agent: Agent) -> tuple[str, ...]:
        """Return the policies that the agent has during a run: with `cory`, a role has those of all roles in turn."""
        cory = self.algorithm.cory
        if cory is None or agent.name not in cory.roles:
            return (agent.policy,)
        return tuple(other.policy for other in self.agents if other.name in cory.roles)

    def trained_policies(self) -> tuple[str, ...]:
        return tuple(name for name, policy in self.policies.items() if not policy.frozen)

    def local_policies(self) -> tuple[str, ...]:
        """Return the policies whose model the run itself loads, without adapters."""
        return tuple(name for name, policy in self.policies.items() if policy.api is None and policy.lora is None)

    def snapshots(self) -> dict[str, str]:
        """Return the policies that are snapshots, each with the policy of which it is one."""
        return {name: policy.snapshot_of for name, policy in self.policies.items() if policy.snapshot_of is not None}

    def base_of(self, policy: str) -> str:
        """Return the policy that has the model: the base of an adapter, or the policy itself."""
        lora = self.policies[policy].lora
        return policy if lora is None else lora.base

    def adapters_of(self, base: str) -> tuple[str, ...]:
        """Return the adapters on a policy's model."""
        return tuple(name for name in self.policies if name != base and self.base_of(name) == base)

    def trained_on(self, base: str) -> tuple[str, ...]:
        """Return what is trained of a policy's model: itself or its adapters."""
        return tuple(name for name in self.trained_policies() if self.base_of(name) == base)

    def critic_owner(self, policy: str) -> str | None:
        """Return the policy whose critic evaluates this policy's rows: itself, or the one whose critic it shares; None
        if it is not trained or has no critic."""
        return critic_owners(self.policies).get(policy)
