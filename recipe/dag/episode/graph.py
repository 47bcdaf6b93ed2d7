"""What the rollout nodes wait for, worked out once per workflow.

Invariant: a node waits only for nodes that stand before it in the workflow's topological order, so no turn can
deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Agent, Node, Workflow


@dataclass(frozen=True, slots=True)
class RolloutNode:
    """One rollout node, its agent, and its place among the others. The tuples hold node ids."""

    node: Node
    agent: Agent
    position: int
    """In the topological order of the rollout nodes."""
    dependencies: tuple[str, ...]
    """The rollout nodes that it names itself."""
    ancestors: frozenset[str]
    """All rollout nodes that it depends on, also through nodes of other kinds."""
    env: str | None
    """The `file.py:Class` that it steps after its call."""
    players: tuple[str, ...]
    """Whose texts of the turn are that env's actions: nodes with obs_with_env up to and including this one, but for
    those that step another env; in agent order. Empty without an env."""

    @property
    def id(self) -> str:
        return self.node.node_id


def rollout_graph(workflow: Workflow) -> tuple[RolloutNode, ...]:
    """The rollout nodes in topological order."""
    ancestors: dict[str, frozenset[str]] = {}
    for node in workflow.nodes:
        ancestors[node.node_id] = frozenset(node.dependencies).union(*(ancestors[name] for name in node.dependencies))
    nodes = workflow.rollout_nodes
    ids = {node.node_id for node in nodes}
    return tuple(
        RolloutNode(
            node=node,
            agent=workflow.agent_of(node),
            position=position,
            dependencies=tuple(name for name in node.dependencies if name in ids),
            ancestors=ancestors[node.node_id] & ids,
            env=_env_of(node),
            players=_players(node, nodes[: position + 1]),
        )
        for position, node in enumerate(nodes)
    )


def _env_of(node: Node) -> str | None:
    paths = node.agent_options.env_path
    if len(paths) > 1:
        raise UserError(f"node {node.node_id}: env_path names {len(paths)} envs; a node steps one: use a node for each")
    return paths[0] if paths else None


def _players(owner: Node, up_to_owner: tuple[Node, ...]) -> tuple[str, ...]:
    env = _env_of(owner)
    if env is None:
        return ()
    chosen = [
        node
        for node in up_to_owner
        if node is owner or (node.agent_options.obs_with_env and _env_of(node) in (None, env))
    ]
    return tuple(node.node_id for node in sorted(chosen, key=lambda node: node.agent_group))
