"""Checks of the names of agents, policies, envs, loops and nodes: letters, digits, `_` and `-`, without duplicates.

Invariant: every name that becomes part of a metric's or a folder's name is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.workflow.draft import Draft


def check_names(draft: Draft) -> Iterator[Problem]:
    agents: list[tuple[KeyPath, str]] = [(("agents", i, "name"), name) for i, name in enumerate(draft.agent_names)]
    nodes: list[tuple[KeyPath, str]] = [(("nodes", i, "id"), name) for i, name in enumerate(draft.node_ids)]
    yield from _check(draft, agents, "agent")
    for kind, key in (("policy", "policies"), ("env", "envs"), ("loop", "loops")):
        yield from _check(draft, [((key, name), name) for name in getattr(draft, key)], kind, key=True)
    yield from _check(draft, nodes, "node")


def _check(draft: Draft, names: list[tuple[KeyPath, str]], kind: str, *, key: bool = False) -> Iterator[Problem]:
    seen: set[str] = set()
    for path, name in names:
        if draft.has(*path) and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) and (name or key):
            message = f"`{name}` is not a valid name; use letters, digits, `_` and `-` (it names metrics and folders)"
            yield draft.source.problem(path, message, key=key)
        elif name in seen:
            yield draft.source.problem(path, f"another {kind} is called `{name}`; rename one of them", key=key)
        if name:
            seen.add(name)
