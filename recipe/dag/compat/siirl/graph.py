"""The graph of a siiRL file. Its training nodes are derived here, so a node that depended on one of them depends on
that node's dependencies instead.

Invariant: an unknown dependency and a cycle are errors in every node, as they are in siiRL.
"""

from __future__ import annotations

from recipe.dag.compat.siirl.nodes import Nodes
from recipe.dag.core.problem import KeyPath
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.graph import find_cycles
from recipe.dag.workflow.source import Source


def check_graph(source: Source, result: Source, nodes: Nodes) -> bool:
    """Check the names and dependencies of the nodes that are not kept, and return whether they are valid. The loader
    checks those that are kept. If a node's name could not be read, unknown names are not reported."""
    report, problems_before = result.problems.append, len(result.problems)
    names = {index: node["node_id"] for index, node in nodes.raw.items() if isinstance(node.get("node_id"), str)}
    seen: set[str] = set()
    for index, node in nodes.raw.items():
        path: KeyPath = ("nodes", index)
        if index not in nodes.kept:
            if names.get(index) in seen:
                message = f"another node is called `{names[index]}`; rename one of them"
                report(source.problem((*path, "node_id"), message))
            for position, name in enumerate(_listed(node)):
                if name not in names.values() and len(names) == len(nodes.raw):
                    others = [other for other in names.values() if other != names.get(index)]
                    message = f"no node `{name}`{did_you_mean(name, others)}"
                    report(source.problem((*path, "dependencies", position), message))
        if index in names:
            seen.add(names[index])
    graph = {name: _listed(nodes.raw[index]) for index, name in names.items()}
    for cycle in find_cycles(graph) if len(graph) == len(names) else ():
        index = next(i for i, name in names.items() if name == cycle[0])
        if any(i not in nodes.kept for i, name in names.items() if name in cycle):
            message = f"cycle: {' -> '.join(cycle)}; remove one of these dependencies"
            report(source.problem(("nodes", index, "dependencies"), message, key=True))
    return len(result.problems) == problems_before


def relink(nodes: Nodes, index: int) -> tuple[list, list[KeyPath]]:
    """Return the node's dependencies, with each node that is not kept replaced by its dependencies, and their paths in
    siiRL's file."""
    by_name = {node.get("node_id"): i for i, node in nodes.raw.items() if isinstance(node.get("node_id"), str)}
    names: list = []
    paths: list[KeyPath] = []

    def visit(owner: int, path: KeyPath | None, trail: frozenset[int]) -> None:
        """Collect the dependencies of `owner`; `path`: that of the node's dependency through which it was reached."""
        dependencies = nodes.raw[owner].get("dependencies")
        for position, name in enumerate(dependencies if isinstance(dependencies, list) else []):
            name_path = path or ("nodes", owner, "dependencies", position)
            target = by_name.get(name) if isinstance(name, str) else None
            if target is not None and target not in nodes.kept:
                if target not in trail:
                    visit(target, name_path, trail | {target})
            elif path is None or target is not None and name not in names:
                names.append(name)
                paths.append(name_path)

    visit(index, None, frozenset({index}))
    return names, paths


def _listed(node: dict) -> list[str]:
    value = node.get("dependencies")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
