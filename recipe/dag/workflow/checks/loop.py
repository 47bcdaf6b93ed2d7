"""Checks of loops and votes.

Invariant: a loop can run as one step: no node outside both depends on its nodes and is a dependency of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import contract, find_cycles, graph_of
from recipe.dag.workflow.node_kinds import EPISODE_KINDS, Kind, title
from recipe.dag.workflow.schema import Node


def check_loops(draft: Draft) -> Iterator[Problem]:
    problem, nodes = draft.source.problem, draft.by_id()
    owner: dict[str, str] = {}
    for name, loop in draft.each_loop():
        path: KeyPath = ("loops", name)
        if not loop.nodes:
            yield problem((*path, "nodes"), "a loop without nodes has no effect; name some or remove it")
        if loop.until is not None and loop.max_rounds == 1:
            message = "`until` has no effect with one round; raise `max_rounds` or remove the loop"
            yield problem((*path, "until"), message, key=True)
        for index, node in enumerate(loop.nodes):
            node_path = (*path, "nodes", index)
            if draft.missing(node):
                yield problem(node_path, draft.no_node(node_path, node))
            elif node in nodes and nodes[node].kind not in EPISODE_KINDS:
                message = f"`{node}` is {title(nodes[node].kind)}; a loop repeats nodes of the episode only"
                yield problem(node_path, message)
            elif node in loop.nodes[:index]:
                yield problem(node_path, f"`{node}` is listed twice; remove one")
            elif node in owner:
                message = f"`{node}` is already in loop `{owner[node]}`; remove it from one of the loops"
                yield problem(node_path, message)
            owner.setdefault(node, name)


def check_loop_order(draft: Draft) -> Iterator[Problem]:
    """Check that each loop can run as one step. The graph must not contain a cycle."""
    graph = graph_of(node for _, node in draft.each_node())
    names = {f"loop {name}": (name, loop) for name, loop in draft.each_loop()}
    seen: set[str] = set()
    bodies = {}
    for key, (_, loop) in names.items():
        bodies[key] = [node for node in loop.nodes if node in graph and node not in seen]
        seen |= set(loop.nodes)
    for cycle in find_cycles(contract(graph, bodies)):
        start = next(index for index, node in enumerate(cycle) if node in names)
        rotated = [*cycle[start:-1], *cycle[:start], cycle[start]]
        name, between = names[rotated[0]][0], " -> ".join(f"`{n}`" for n in rotated[1:-1])
        message = (
            f"{between} depends on a node of this loop, and another node of the loop depends on it; add it to `nodes`, "
            "or remove one of these dependencies"
        )
        yield draft.source.problem(("loops", name, "nodes"), message, key=True)


def check_vote(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    problem, nodes = draft.source.problem, draft.by_id()
    if node.kind is not Kind.VOTE:
        return
    if len(set(node.after)) < 2:
        position = (*path, "after") if draft.has(*path, "after") else path
        yield problem(position, "a vote needs at least two nodes; name them under `after`")
    for index, name in enumerate(node.after):
        if name in nodes and nodes[name].kind is not Kind.ROLLOUT:
            message = f"a vote counts rollout nodes, but `{name}` is {title(nodes[name].kind)}; remove it"
            yield problem((*path, "after", index), message)
