"""Checks of loops and votes.

Invariant: seen from outside a loop is one step: nothing outside both waits for its body and is waited for by it.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import contract, find_cycles, graph_of
from recipe.dag.workflow.problem import KeyPath, Problem
from recipe.dag.workflow.schema import EPISODE_ROLES, Node, NodeRole


def check_loops(draft: Draft) -> Iterator[Problem]:
    say, nodes = draft.source.problem, draft.by_id()
    owner: dict[str, str] = {}
    for name, loop in draft.each_loop():
        path: KeyPath = ("loops", name)
        if not loop.nodes:
            yield say((*path, "nodes"), "a loop without nodes does nothing; name some or remove it")
        if loop.until is not None and loop.max_rounds == 1:
            message = "nobody reads `until` with one round; raise max_rounds or remove the loop"
            yield say((*path, "until"), message, key=True)
        for index, node in enumerate(loop.nodes):
            at = (*path, "nodes", index)
            if draft.missing(node):
                yield say(at, draft.no_node(at, node))
            elif node in nodes and nodes[node].node_role not in EPISODE_ROLES:
                yield say(at, f"`{node}` is a {nodes[node].node_role} node; a loop repeats nodes of the episode only")
            elif node in loop.nodes[:index]:
                yield say(at, f"`{node}` is listed twice")
            elif node in owner:
                yield say(at, f"`{node}` is in loop `{owner[node]}` already; a node is in one loop")
            owner.setdefault(node, name)


def check_loop_order(draft: Draft) -> Iterator[Problem]:
    """Needs a graph without cycles."""
    graph = graph_of(node for _, node in draft.each_node())
    names = {f"loop {name}": (name, loop) for name, loop in draft.each_loop()}
    seen: set[str] = set()
    bodies = {}
    for key, (_, loop) in names.items():
        bodies[key] = [node for node in loop.nodes if node in graph and node not in seen]
        seen |= set(loop.nodes)
    for cycle in find_cycles(contract(graph, bodies)):
        start = next(index for index, node in enumerate(cycle) if node in names)
        around = [*cycle[start:-1], *cycle[:start], cycle[start]]
        name, between = names[around[0]][0], " -> ".join(f"`{n}`" for n in around[1:-1])
        message = f"{between} waits for this loop and is waited for by it; put it into `nodes`, or out of the way"
        yield draft.source.problem(("loops", name, "nodes"), message, key=True)


def check_vote(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    say, nodes = draft.source.problem, draft.by_id()
    if node.node_role is not NodeRole.VOTE:
        if node.vote is not None:
            message = f"only VOTE nodes read this, not {node.node_role}; write `node_role: VOTE` or remove it"
            yield say((*path, "vote"), message, key=True)
        return
    if len(set(node.dependencies)) < 2:
        where = (*path, "dependencies") if draft.has(*path, "dependencies") else path
        yield say(where, "a vote is among at least two nodes; name them under `dependencies`")
    for index, name in enumerate(node.dependencies):
        if name in nodes and nodes[name].node_role is not NodeRole.ROLLOUT:
            message = f"a vote counts rollout nodes, `{name}` is {nodes[name].node_role}"
            yield say((*path, "dependencies", index), message)
