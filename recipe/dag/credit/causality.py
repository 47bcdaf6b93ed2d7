"""The graph of an episode's calls, and which of them can react to which; for credit and for the checks of a workflow.

Invariant: pure, and free of torch. A graph is a mapping id -> ids it depends on; ids that are not keys are ignored, and
the members of a cycle may react to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from recipe.dag.core.errors import UserError

Graph = Mapping[str, Sequence[str]]


def descendants(graph: Graph, calls: Iterable[str]) -> dict[str, set[str]]:
    """Return, per call, all calls that come after it and may react to it. The call itself is among them only if it is
    part of a cycle."""
    followers: dict[str, list[str]] = {}
    for node, depends in graph.items():
        for dependency in depends:
            followers.setdefault(dependency, []).append(node)

    def after(call: str) -> set[str]:
        visited: set[str] = set()
        stack = list(followers.get(call, ()))
        while stack:
            current = stack.pop()
            if current not in visited:
                visited.add(current)
                stack.extend(followers.get(current, ()))
        return visited

    return {call: after(call) for call in calls}


def in_baseline(what: str) -> str:
    """Return the error message for a baseline that reads `what`."""
    return f"the mixer's baseline would condition on {what}; leave it out"


def reacting(name: str) -> str:
    """Return the description of a call that may react, for `in_baseline`."""
    return f"{name}, which comes after it and may react to it"


def check_baseline(graph: Graph, call: str, conditions: Sequence[str]) -> None:
    """Raise UserError if one of the `conditions` that the baseline of `call` reads is the call itself or comes after
    it."""
    after = descendants(graph, [call])[call]
    for other in conditions:
        if other == call or other in after:
            what = "its own message" if other == call else reacting(f"`{other}`")
            raise UserError(f"node {call}: {in_baseline(what)}")
