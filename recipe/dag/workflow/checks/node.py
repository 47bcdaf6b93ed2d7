"""Checks of each node's options: an option that its kind does not read is an error.

Invariant: every option of a node that passes has an effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recipe.dag.core.paths import names_env
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.node_kinds import EPISODE_KINDS, Kind, title
from recipe.dag.workflow.schema import Node

_ROLLOUT_KEYS = ("hooks", "prompt_options", "parse_options", "env", "env_route", "sees_env", "env_pays")
_READERS = {
    **dict.fromkeys(_ROLLOUT_KEYS, ("rollout nodes", (Kind.ROLLOUT,))),
    "args": ("reward and compute nodes", (Kind.REWARD, Kind.COMPUTE)),
    "scope": ("reward nodes", (Kind.REWARD,)),
}
"""Key -> the kinds of nodes that read it, in words and as a tuple."""


def check_nodes(draft: Draft) -> Iterator[Problem]:
    for index, node in draft.each_node():
        path: KeyPath = ("nodes", index)
        yield from _check_options(draft, node, path)
        yield from _check_vote(draft, node, path)
        yield from _check_env(draft, node, path)
        yield from _check_env_route(draft, node, path)


def _check_options(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    """Check that the node's kind reads its keys."""
    reason = f"and this is {title(node.kind)}"
    for key, (readers, kinds) in _READERS.items():
        if node.kind not in kinds and draft.has(*path, key):
            hint = "; a class goes under `hooks`" if key == "args" and node.kind is Kind.ROLLOUT else "; remove it"
            yield draft.source.problem((*path, key), f"only {readers} read this, {reason}{hint}", key=True)
    if node.when is not None and node.kind not in EPISODE_KINDS:
        message = f"{title(node.kind)} always runs; remove `when`, which is for nodes of the episode"
        yield draft.source.problem((*path, "when"), message, key=True)


def _check_env(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    problem = draft.source.problem
    if node.kind is not Kind.ROLLOUT:
        return
    if draft.complete and node.sees_env and not any(other.env for _, other in draft.each_node()):
        message = "no node has an env; add `env: file.py:Class` or remove it"
        yield problem((*path, "sees_env"), message, key=True)
    # An entry that could not be read was reported; the list may be empty without it.
    location = problem((*path, "env"), "").where
    unread = any(re.match(rf"{re.escape(location)}(\W|$)", earlier.where) for earlier in draft.problems)
    if node.env_pays and not node.env and not unread:
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


def _check_vote(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
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
