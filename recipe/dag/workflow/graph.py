"""The graph of a workflow: orders and cycles. Pure functions.

Invariant: every order is a function of the file alone. A graph is a mapping id -> ids it depends on, in the file's
order; ids that are not keys are ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from recipe.dag.workflow.node import Node

Graph = Mapping[str, Sequence[str]]


def graph_of(nodes: Iterable[Node]) -> dict[str, tuple[str, ...]]:
    return {node.id: node.after for node in nodes}


def topological_order(graph: Graph) -> list[str]:
    """Sort the nodes, dependencies first, in the file's order among ready ones. Raises ValueError on a cycle."""
    position = {node: index for index, node in enumerate(graph)}
    waiting = {node: {d for d in depends if d in graph} for node, depends in graph.items()}
    followers = _followers(graph)
    ready = [position[node] for node, depends in waiting.items() if not depends]
    names, order = list(graph), []
    while ready:
        node = names[heapq.heappop(ready)]
        order.append(node)
        for follower in followers[node]:
            waiting[follower].discard(node)
            if not waiting[follower]:
                heapq.heappush(ready, position[follower])
    if len(order) < len(graph):
        raise ValueError(f"cycle: {' -> '.join(find_cycle(graph) or [])}")
    return order


def find_cycle(graph: Graph) -> list[str] | None:
    """Return a cycle in the direction of data flow, from its first node in the file to itself, or None."""
    followers = _followers(graph)
    finished: set[str] = set()
    for start in graph:
        trail, on_trail = [start], {start}
        branches = [iter(followers[start])]
        while trail:
            node = next((n for n in branches[-1] if n not in finished), None)
            if node is None:
                branches.pop()
                on_trail.discard(trail[-1])
                finished.add(trail.pop())
            elif node in on_trail:
                return _from_first(trail[trail.index(node) :], list(graph))
            else:
                trail.append(node)
                on_trail.add(node)
                branches.append(iter(followers[node]))
    return None


def find_cycles(graph: Graph) -> list[list[str]]:
    """Return disjoint cycles; without their nodes the graph has no cycle."""
    remaining, cycles = dict(graph), []
    while cycle := find_cycle(remaining):
        cycles.append(cycle)
        remaining = {node: depends for node, depends in remaining.items() if node not in cycle}
    return cycles


def levels(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Group the nodes by depth; nodes of one level can run at the same time. A level has the file's order."""
    depth: dict[str, int] = {}
    for node in topological_order(graph):
        depth[node] = 1 + max((depth[d] for d in graph[node] if d in depth), default=-1)
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in graph:
        rows[depth[node]].append(node)
    return tuple(map(tuple, rows))


def ancestors(graph: Graph, node: str) -> set[str]:
    """Return all nodes that `node` depends on, directly or indirectly; in a cycle this includes itself."""
    reached: set[str] = set()
    stack = list(graph[node])
    while stack:
        current = stack.pop()
        if current in graph and current not in reached:
            reached.add(current)
            stack.extend(graph[current])
    return reached


def agents_heard(nodes: Iterable[Node]) -> dict[str, tuple[str, ...]]:
    """Return, by agent, the other agents whose messages precede one of the agent's messages in a turn."""
    nodes = list(nodes)
    graph, speaker = graph_of(nodes), {node.id: node.agent for node in nodes if node.agent is not None}
    heard: dict[str, set[str]] = {agent: set() for agent in speaker.values()}
    for node, agent in speaker.items():
        heard[agent] |= {speaker[before] for before in ancestors(graph, node) if before in speaker} - {agent}
    return {agent: tuple(other for other in heard if other in others) for agent, others in heard.items()}


def sinks(graph: Graph) -> list[str]:
    """Return the nodes that no node depends on."""
    used = {d for depends in graph.values() for d in depends}
    return [node for node in graph if node not in used]


def contract(graph: Graph, groups: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Return the graph with every group replaced by one node of the group's name, without edges inside a group."""
    group_of = {node: name for name, nodes in groups.items() for node in nodes}
    result: dict[str, dict[str, None]] = {}
    for node, depends in graph.items():
        name = group_of.get(node, node)
        targets = (group_of.get(d, d) for d in depends if d in graph)
        result.setdefault(name, {}).update(dict.fromkeys(t for t in targets if t != name))
    return {name: tuple(depends) for name, depends in result.items()}


def causal_order(graph: Graph, loops: Mapping[str, Sequence[str]]) -> list[str]:
    """Sort the nodes topologically with each loop as one vertex, and topologically inside each loop. Raises ValueError
    on a cycle."""
    bodies = {f"loop {name}": [node for node in graph if node in nodes] for name, nodes in loops.items()}
    order = topological_order(contract(graph, bodies))
    inner = (
        topological_order({n: graph[n] for n in bodies.get(unit, ())}) if unit not in graph else [unit]
        for unit in order
    )
    return [node for nodes in inner for node in nodes]


def with_whole_loops(graph: Graph, loops: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the graph in which a node that depends on one node of a loop from outside depends on all its nodes."""
    body = {node: tuple(nodes) for nodes in loops for node in nodes}

    def waits(node: str, dependency: str) -> tuple[str, ...]:
        whole = body.get(dependency, (dependency,))
        return (dependency,) if node in whole else whole

    return {n: tuple(dict.fromkeys(w for d in depends for w in waits(n, d))) for n, depends in graph.items()}


def _followers(graph: Graph) -> dict[str, list[str]]:
    followers: dict[str, list[str]] = {node: [] for node in graph}
    for node, depends in graph.items():
        for dependency in dict.fromkeys(depends):
            if dependency in followers:
                followers[dependency].append(node)
    return followers


def _from_first(cycle: list[str], order: list[str]) -> list[str]:
    first = min(range(len(cycle)), key=lambda index: order.index(cycle[index]))
    rotated = cycle[first:] + cycle[:first]
    return [*rotated, rotated[0]]
