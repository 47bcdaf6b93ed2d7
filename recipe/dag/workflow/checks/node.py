"""Checks of each node's options: an option that its kind does not read is an error.

Invariant: every option of a node that passes has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.counted import counted
from recipe.dag.core.paths import names_env
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.node import KINDS, OPTIONS, Kind, Node, readers, title

_INSTEAD = {
    ("args", Kind.ROLLOUT): "a class goes under `hooks`",
    ("policy", Kind.ROLLOUT): "its agent names the policy",
}
"""(key, kind that does not read it) -> hint."""


def check_node(draft: Draft, index: int, node: Node) -> Iterator[Problem]:
    path: KeyPath = ("nodes", index)
    yield from _check_options(draft, node, path)
    yield from _check_voters(draft, node, path)
    if node.kind is Kind.ROLLOUT:
        yield from _check_env(draft, node, path)
        yield from _check_env_route(draft, node, path)


def _check_options(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    """Check that the node's kind reads its keys."""
    for key in (key for key in OPTIONS if key not in KINDS[node.kind].reads):
        if draft.has(*path, key):
            hint = _INSTEAD.get((key, node.kind), "remove it")
            message = f"only {readers(key)} read this, and this is {title(node.kind)}; {hint}"
            yield draft.source.problem((*path, key), message, key=True)


def _check_voters(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    """Check the nodes that a node counts, if its kind does."""
    least, nodes = KINDS[node.kind].voters, draft.by_id()
    if len(set(node.after)) < least:
        position = (*path, "after") if draft.has(*path, "after") else path
        message = f"a {node.kind} needs at least {counted(least, 'node')}; name them under `after`"
        yield draft.source.problem(position, message)
    for index, name in enumerate(node.after if least else ()):
        if name in nodes and nodes[name].kind is not Kind.ROLLOUT:
            message = f"a {node.kind} counts rollout nodes, but `{name}` is {title(nodes[name].kind)}; remove it"
            yield draft.source.problem((*path, "after", index), message)


def _check_env(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    problem = draft.source.problem
    if draft.complete and node.sees_env and not any(other.env for _, other in draft.each_node()):
        message = "no node has an env; add `env: file.py:Class` or remove it"
        yield problem((*path, "sees_env"), message, key=True)
    if node.env_pays and not node.env and not draft.reported(*path, "env"):
        message = "this node does not step an env; move this to the node with `env`, or add `env: file.py:Class`"
        yield problem((*path, "env_pays"), message, key=True)


def _check_env_route(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    problem = draft.source.problem
    for index, entry in enumerate(node.env):
        if entry in node.env[:index]:
            yield problem((*path, "env", index), f"`{entry}` is listed twice; remove one")
        elif names_env(entry) and entry not in draft.envs:
            hint = did_you_mean(entry, draft.envs) if draft.envs else "; declare it there, or write `file.py:Class`"
            yield problem((*path, "env", index), f"there is no `{entry}` under `envs`{hint}")
    if len(node.env) > 1 and node.env_route is None and not draft.has(*path, "env_route"):
        message = "several envs need `env_route: <path into the sample>`, which selects the env of an episode"
        yield problem((*path, "env"), message, key=True)
    if node.env_route is not None:
        if len(node.env) < 2:
            message = "`env_route` has no effect with fewer than two envs; name several under `env`, or remove it"
            yield problem((*path, "env_route"), message, key=True)
        if not all(node.env_route.split(".")):
            message = "write a path into the sample, such as `data_source` or `extra_info.env`"
            yield problem((*path, "env_route"), message)
