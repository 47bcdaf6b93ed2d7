"""A workflow file whose pieces are read, but not yet checked against each other.

Invariant: an invalid piece is None, so that indices are those of the file; its name is kept, so that other pieces may
refer to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.catalogue import DEFAULT
from recipe.dag.core.problem import KeyPath, Problem, contains
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.agent_schema import Agent, Policy, ToolSpec
from recipe.dag.workflow.condition import Condition
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.schema import EnvSpec, EpisodeSpec, Loop
from recipe.dag.workflow.source import Source, value_at

TOP_LEVEL = "dag_id description global_config agents policies tools envs episode loops algorithm nodes".split()


@dataclass(slots=True)
class Draft:
    source: Source
    dag_id: str = ""
    description: str = ""
    agents: list[Agent | None] = field(default_factory=list)
    agent_names: list[str] = field(default_factory=list)
    policies: dict[str, Policy | None] = field(default_factory=dict)
    tools: dict[str, ToolSpec | None] = field(default_factory=dict)
    envs: dict[str, EnvSpec | None] = field(default_factory=dict)
    loops: dict[str, Loop | None] = field(default_factory=dict)
    nodes: list[Node | None] = field(default_factory=list)
    node_ids: list[str] = field(default_factory=list)
    episode: EpisodeSpec = EpisodeSpec()
    algorithm: Algorithm = DEFAULT()
    problems: list[Problem] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True if every piece could be read, and names are unique."""
        pieces = [*self.agents, *self.nodes]
        for mapping in (self.policies, self.tools, self.envs, self.loops):
            pieces += mapping.values()
        unique = all(len(set(names)) == len(names) for names in (self.agent_names, self.node_ids))
        not_empty = self.agents and self.policies and self.nodes and not self.source.unread
        return bool(not_empty) and None not in pieces and unique

    def has(self, *path: str | int) -> bool:
        """Return whether the user wrote this key or list item."""
        return self.source.has(path)

    def reported(self, *path: str | int) -> bool:
        """Return whether reading the value at `path`, or a part of it, was reported as a mistake."""
        at = self.source.problem(path, "")
        return any(problem.file == at.file and contains(at.where, problem.where) for problem in self.problems)

    def missing(self, node: str) -> bool:
        """Return whether the node certainly does not exist: its name is unknown, all names could be read, and it is not
        part of a sub-workflow that could not be read."""
        return not self.unread(node) and not {node, ""} & set(self.node_ids)

    def unread(self, node: str) -> bool:
        """Return whether the node, or the sub-workflow that it would be part of, could not be read completely."""
        return any(node == name or node.startswith(f"{name}__") for name in self.source.unread if name)

    def no_node(self, path: KeyPath, name: str, *, excluded: str = "") -> str:
        """Return the error message for `name`, written at `path`, which is not a node. `excluded` is not suggested."""
        origin = self.source.origin(path)
        written = self._as_written(path) or name
        names = []
        for index in range(len(self.node_ids)):
            if self.source.origin(("nodes", index)).source is origin.source:
                names.append(self._as_written(("nodes", index, "id")))
        return f"no node `{written}`{did_you_mean(written, [n for n in names if n and n != excluded])}"

    def _as_written(self, path: KeyPath) -> str:
        """Return the text at `path` as its file has it: without the prefix of a sub-workflow. "" if it is no text."""
        origin = self.source.origin(path)
        value = value_at(origin.source.data, origin.path)
        return value if isinstance(value, str) else ""

    def agent_of(self, node: Node) -> Agent | None:
        """Return the agent of a rollout node; None if it could not be read."""
        return next((agent for _, agent in self.each_agent() if agent.name == node.agent), None)

    def agent(self, node: Node) -> Agent:
        """Return the agent of a rollout node of a complete draft."""
        agent = self.agent_of(node)
        assert agent is not None, node.id
        return agent

    def policy(self, name: str) -> Policy:
        """Return a policy of a complete draft."""
        policy = self.policies[name]
        assert policy is not None, name
        return policy

    def each_env(self) -> Iterator[tuple[str, EnvSpec]]:
        return ((name, env) for name, env in self.envs.items() if env is not None)

    def each_node(self) -> Iterator[tuple[int, Node]]:
        return ((index, node) for index, node in enumerate(self.nodes) if node is not None)

    def each_agent(self) -> Iterator[tuple[int, Agent]]:
        return ((index, agent) for index, agent in enumerate(self.agents) if agent is not None)

    def each_policy(self) -> Iterator[tuple[str, Policy]]:
        return ((name, policy) for name, policy in self.policies.items() if policy is not None)

    def each_loop(self) -> Iterator[tuple[str, Loop]]:
        return ((name, loop) for name, loop in self.loops.items() if loop is not None)

    def by_id(self) -> dict[str, Node]:
        return {node.id: node for _, node in self.each_node()}

    def each_condition(self) -> Iterator[tuple[KeyPath, Condition, str | None, str | None]]:
        """Yield (path, condition, the node that it guards or None, the loop that it ends or None) of every `when` and
        `until`."""
        for index, node in self.each_node():
            if node.when is not None:
                yield ("nodes", index, "when"), node.when, node.id, None
        for name, loop in self.each_loop():
            if loop.until is not None:
                yield ("loops", name, "until"), loop.until, None, name
