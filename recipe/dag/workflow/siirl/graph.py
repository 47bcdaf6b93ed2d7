"""The graph of a siiRL file: its training nodes are derived here, so whoever waited for one waits for what that one
waited for.

Invariant: an unknown dependency and a cycle are errors wherever they stand, as they are in siiRL.
"""

from __future__ import annotations

from recipe.dag.workflow.graph import find_cycles
from recipe.dag.workflow.problem import KeyPath, did_you_mean
from recipe.dag.workflow.siirl.nodes import Nodes
from recipe.dag.workflow.source import Source


def check_graph(source: Source, result: Source, nodes: Nodes) -> bool:
    """Names and dependencies of the nodes that are not kept; the others' are checked like everybody's. Where a node's
    name could not be read, an unknown one may be that."""
    say, before = result.problems.append, len(result.problems)
    names = {index: node["node_id"] for index, node in nodes.raw.items() if isinstance(node.get("node_id"), str)}
    seen: set[str] = set()
    for index, node in nodes.raw.items():
        path: KeyPath = ("nodes", index)
        if index not in nodes.kept:
            if names.get(index) in seen:
                message = f"another node is called `{names[index]}`; names must differ"
                say(source.problem((*path, "node_id"), message))
            for position, name in enumerate(_listed(node)):
                if name not in names.values() and len(names) == len(nodes.raw):
                    others = [other for other in names.values() if other != names.get(index)]
                    message = f"no node `{name}`{did_you_mean(name, others)}"
                    say(source.problem((*path, "dependencies", position), message))
        if index in names:
            seen.add(names[index])
    graph = {name: _listed(nodes.raw[index]) for index, name in names.items()}
    for cycle in find_cycles(graph) if len(graph) == len(names) else ():
        index = next(i for i, name in names.items() if name == cycle[0])
        if any(i not in nodes.kept for i, name in names.items() if name in cycle):
            message = f"cycle: {' -> '.join(cycle)}; remove one of these dependencies"
            say(source.problem(("nodes", index, "dependencies"), message, key=True))
    return len(result.problems) == before


def relink(nodes: Nodes, index: int) -> tuple[list, list[KeyPath]]:
    """The node's dependencies with each node that is not kept replaced by its own, and the place of each."""
    by_name = {node.get("node_id"): i for i, node in nodes.raw.items() if isinstance(node.get("node_id"), str)}
    names: list = []
    places: list[KeyPath] = []

    def visit(owner: int, place: KeyPath | None, trail: frozenset[int]) -> None:
        dependencies = nodes.raw[owner].get("dependencies")
        for position, name in enumerate(dependencies if isinstance(dependencies, list) else []):
            here = place or ("nodes", owner, "dependencies", position)
            target = by_name.get(name) if isinstance(name, str) else None
            if target is not None and target not in nodes.kept:
                if target not in trail:
                    visit(target, here, trail | {target})
            elif place is None or target is not None and name not in names:
                names.append(name)
                places.append(here)

    visit(index, None, frozenset({index}))
    return names, places


def _listed(node: dict) -> list[str]:
    value = node.get("dependencies")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
