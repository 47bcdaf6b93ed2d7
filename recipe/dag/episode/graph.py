"""The nodes that run in an episode and the order between them, computed once per workflow.

Invariant: pure. `position` is a causal order: a node comes after everything it depends on, and the nodes of a loop are
adjacent. A node that waits only for earlier positions cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.agent_schema import Agent
from recipe.dag.workflow.graph import causal_order, graph_of
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.schema import Loop, Workflow

Slot = tuple[str, int]
"""One run of a node within a turn: (node id, round). Outside loops the round is 0."""


@dataclass(frozen=True, slots=True)
class EpisodeNode:
    """A rollout, vote or compute node and its position in the graph. The collections hold ids of such nodes."""

    spec: Node
    """The node as the workflow defines it."""
    agent: Agent | None
    """None for a vote or compute node."""
    agent_group: int
    """The index of the agent; -1 for a vote or compute node."""
    position: int
    """Index in the causal order."""
    unit: int
    """Position of the first node of its loop; outside loops its own position."""
    after: tuple[str, ...]
    ancestors: frozenset[str]
    """All nodes it waits for within a turn. A node that depends on a node of a loop from outside waits for the whole
    loop."""
    loop: str | None

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def agent_name(self) -> str:
        """Empty for a vote or compute node."""
        return self.agent.name if self.agent else ""


@dataclass(frozen=True, slots=True)
class EpisodeGraph:
    """All nodes that run in an episode."""

    nodes: tuple[EpisodeNode, ...]
    """In causal order."""
    by_id: Mapping[str, EpisodeNode]
    loops: Mapping[str, Loop]
    bodies: Mapping[str, tuple[EpisodeNode, ...]]
    """The nodes of each loop, in causal order."""

    def causal(self, slot: Slot) -> tuple[int, int, int]:
        """Return the key that sorts the slots of a turn: loops round by round, everything else by position."""
        node = self.by_id[slot[0]]
        return node.unit, slot[1], node.position

    def max_rounds(self, node: EpisodeNode) -> int:
        """Return how often the node may run in a turn: more than once only in a loop."""
        return self.loops[node.loop].max_rounds if node.loop else 1

    def players(self, envs: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Return, for each node that steps an env, the nodes whose texts are its actions, in agent order.

        These are the nodes with `sees_env` up to and including the stepping node, except those that step another env;
        for a stepping node in a loop, only nodes of that loop. `envs`: the env that each node steps, by node id.
        """
        return {owner.id: self._players_of(owner, envs) for owner in self.nodes if owner.id in envs}

    def _players_of(self, owner: EpisodeNode, envs: Mapping[str, str]) -> tuple[str, ...]:
        env = envs[owner.id]

        def plays(node: EpisodeNode) -> bool:
            if node is owner:
                return True
            # A node that only watches plays in every env; one that steps an env plays in that env alone.
            same_env = envs.get(node.id, env) == env
            return node.spec.sees_env and same_env and owner.loop in (None, node.loop)

        candidates = filter(plays, self.nodes[: owner.position + 1])
        return tuple(node.id for node in sorted(candidates, key=lambda node: node.agent_group))


def episode_graph(workflow: Workflow) -> EpisodeGraph:
    """Return the graph. Raises UserError if two loops share a node, or if the nodes of a loop wait for a node that
    waits for the loop."""
    specs = {spec.id: spec for spec in workflow.episode_nodes}
    loop_of = _loop_of(workflow, specs)
    groups: dict[str | None, int] = {agent.name: index for index, agent in enumerate(workflow.agents)}
    units: dict[str, int] = {}
    ancestors: dict[str, frozenset[str]] = {}
    nodes: list[EpisodeNode] = []
    for position, spec in enumerate(_causal_order(workflow, specs, loop_of)):
        name, loop = spec.id, loop_of.get(spec.id)
        dependencies = tuple(other for other in spec.after if other in specs)
        waits_for = {node for other in dependencies for node in _with_loop(workflow, other, loop, loop_of)}
        ancestors[name] = frozenset(waits_for).union(*(ancestors[other] for other in waits_for))
        group = groups.get(spec.agent, -1)
        nodes.append(
            EpisodeNode(
                spec=spec,
                agent=workflow.agents[group] if group >= 0 else None,
                agent_group=group,
                position=position,
                unit=units.setdefault(loop, position) if loop else position,
                after=dependencies,
                ancestors=ancestors[name],
                loop=loop,
            )
        )
    return EpisodeGraph(
        nodes=tuple(nodes),
        by_id={node.id: node for node in nodes},
        loops=workflow.loops,
        bodies={name: tuple(node for node in nodes if node.loop == name) for name in workflow.loops},
    )


def _loop_of(workflow: Workflow, specs: Mapping[str, Node]) -> dict[str, str]:
    loop_of: dict[str, str] = {}
    for name, loop in workflow.loops.items():
        for node in loop.nodes:
            if node not in specs:
                raise UserError(f"loop {name}: {node} does not run in an episode; remove it from `nodes`")
            if node in loop_of:
                raise UserError(f"loop {name}: node {node} is already in loop {loop_of[node]}; remove it from one")
            loop_of[node] = name
    return loop_of


def _causal_order(workflow: Workflow, specs: Mapping[str, Node], loop_of: Mapping[str, str]) -> list[Node]:
    """Sort topologically with each loop as one vertex, then topologically inside each loop."""
    loops = {loop: [name for name in specs if loop_of.get(name) == loop] for loop in workflow.loops}
    try:
        return [specs[name] for name in causal_order(graph_of(specs.values()), loops)]
    except ValueError as error:
        raise UserError(f"{workflow.path}: {error}; add the nodes between them to the loop") from error


def _with_loop(workflow: Workflow, name: str, loop: str | None, loop_of: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that a node of `loop` waits for if it depends on `name`: all of name's loop if that differs."""
    other = loop_of.get(name)
    return (name,) if other is None or other == loop else tuple(workflow.loops[other].nodes)
