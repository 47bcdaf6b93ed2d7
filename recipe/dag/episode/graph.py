"""The nodes that run in an episode, and how they stand to each other; worked out once per workflow.

Invariant: pure. `position` is a causal order: a node stands behind all that it depends on, and the nodes of a loop
stand side by side. Whoever waits only for nodes before its own position can never deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recipe.dag.errors import UserError
from recipe.dag.workflow.graph import causal_order, graph_of
from recipe.dag.workflow.schema import Agent, Loop, Node, NodeRole, Workflow

Slot = tuple[str, int]
"""A node's move within one turn: (node id, round). Outside of loops the round is 0."""


@dataclass(frozen=True, slots=True)
class EpisodeNode:
    """One rollout, vote or compute node, and its place among the others. The collections hold ids of such nodes."""

    node: Node
    agent: Agent | None
    """None: a vote or compute node."""
    position: int
    """In the causal order."""
    unit: int
    """The position of its loop's first node; outside of loops its own."""
    dependencies: tuple[str, ...]
    ancestors: frozenset[str]
    """All that it waits for in a pass. Who depends on one node of a loop from outside waits for the whole loop."""
    loop: str | None

    @property
    def id(self) -> str:
        return self.node.node_id


@dataclass(frozen=True, slots=True)
class EpisodeGraph:
    nodes: tuple[EpisodeNode, ...]
    """In causal order."""
    by_id: Mapping[str, EpisodeNode]
    loops: Mapping[str, Loop]
    bodies: Mapping[str, tuple[EpisodeNode, ...]]
    """The nodes of each loop, in causal order."""

    def causal(self, slot: Slot) -> tuple[int, int, int]:
        """The key that sorts the moves of a turn: loops round by round, everything else by position."""
        place = self.by_id[slot[0]]
        return place.unit, slot[1], place.position

    def players(self, envs: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """By node that steps an env: the nodes whose texts are its actions, in agent order.

        They are the nodes with obs_with_env up to and including that one, but for those that step another env, and for
        a node in a loop those of its loop. `envs`: the env that each node steps, by node id.
        """
        return {
            owner.id: tuple(
                place.id
                for place in sorted(self.nodes[: owner.position + 1], key=lambda place: place.node.agent_group)
                if place is owner
                or place.node.agent_options.obs_with_env
                and envs.get(place.id, envs[owner.id]) == envs[owner.id]
                and owner.loop in (None, place.loop)
            )
            for owner in self.nodes
            if owner.id in envs
        }


def episode_graph(workflow: Workflow) -> EpisodeGraph:
    """Raises UserError for loops that share a node, and for one whose nodes wait for something that waits for it."""
    inside = {node.node_id: node for node in workflow.episode_nodes}
    loop_of = _loop_of(workflow, inside)
    order = _causal_order(workflow, inside, loop_of)
    units: dict[str, int] = {}
    ancestors: dict[str, frozenset[str]] = {}
    nodes: list[EpisodeNode] = []
    for position, node in enumerate(order):
        name, loop = node.node_id, loop_of.get(node.node_id)
        dependencies = tuple(other for other in node.dependencies if other in inside)
        near = {body for other in dependencies for body in _whole(workflow, other, loop, loop_of)}
        ancestors[name] = frozenset(near).union(*(ancestors[other] for other in near))
        nodes.append(
            EpisodeNode(
                node=node,
                agent=workflow.agent_of(node) if node.node_role is NodeRole.ROLLOUT else None,
                position=position,
                unit=units.setdefault(loop, position) if loop else position,
                dependencies=dependencies,
                ancestors=ancestors[name],
                loop=loop,
            )
        )
    return EpisodeGraph(
        nodes=tuple(nodes),
        by_id={place.id: place for place in nodes},
        loops=workflow.loops,
        bodies={name: tuple(place for place in nodes if place.loop == name) for name in workflow.loops},
    )


def _loop_of(workflow: Workflow, inside: Mapping[str, Node]) -> dict[str, str]:
    loop_of: dict[str, str] = {}
    for name, loop in workflow.loops.items():
        for node in loop.nodes:
            if node not in inside:
                raise UserError(f"loop {name}: {node} is no node that runs in an episode; remove it from `nodes`")
            if node in loop_of:
                raise UserError(f"loop {name}: node {node} is in loop {loop_of[node]}, too; a node has one loop")
            loop_of[node] = name
    return loop_of


def _causal_order(workflow: Workflow, inside: Mapping[str, Node], loop_of: Mapping[str, str]) -> list[Node]:
    """Topological with each loop as one vertex; inside a loop, topological too."""
    loops = {loop: [name for name in inside if loop_of.get(name) == loop] for loop in workflow.loops}
    try:
        return [inside[name] for name in causal_order(graph_of(inside.values()), loops)]
    except ValueError as error:
        raise UserError(f"{workflow.path}: {error}; put the nodes between into the loop, too") from error


def _whole(workflow: Workflow, name: str, loop: str | None, loop_of: Mapping[str, str]) -> tuple[str, ...]:
    """The node, or all nodes of its loop for someone outside of it."""
    other = loop_of.get(name)
    return (name,) if other in (None, loop) else workflow.loops[other].nodes
