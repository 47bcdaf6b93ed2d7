"""What can react to what: the graph of an episode's calls, for credit and for the checks of a workflow alike.

Invariant: pure and free of torch. A graph is a mapping id -> ids it depends on; ids that are no keys are ignored, and a
cycle means that its members may react to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from recipe.dag.errors import UserError

Graph = Mapping[str, Sequence[str]]


def descendants(graph: Graph, calls: Iterable[str]) -> dict[str, set[str]]:
    """By call: all that comes after it and may react to it; the call itself only where it stands in a cycle."""
    followers: dict[str, list[str]] = {}
    for node, depends in graph.items():
        for dependency in depends:
            followers.setdefault(dependency, []).append(node)

    def after(call: str) -> set[str]:
        found: set[str] = set()
        stack = list(followers.get(call, ()))
        while stack:
            current = stack.pop()
            if current not in found:
                found.add(current)
                stack.extend(followers.get(current, ()))
        return found

    return {call: after(call) for call in calls}


def in_baseline(what: str) -> str:
    """What is wrong with a baseline that reads `what`."""
    return f"the mixer's baseline would condition on {what}; leave it out"


def reacting(name: str) -> str:
    return f"{name}, which comes after it and may react to it"


def check_baseline(graph: Graph, call: str, conditions: Sequence[str]) -> None:
    """Raises UserError if a baseline for `call` would read `call` itself or what comes after it."""
    after = descendants(graph, [call])[call]
    for other in conditions:
        if other == call or other in after:
            what = "its own message" if other == call else reacting(f"`{other}`")
            raise UserError(f"node {call}: {in_baseline(what)}")
