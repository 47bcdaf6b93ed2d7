"""Checks of each node's options: an option that its role does not read is an error.

Invariant: every option of a node that passes has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.paths import names_env
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.checks.loop import check_vote
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.node_kinds import EPISODE_ROLES, KINDS, NodeRole
from recipe.dag.workflow.schema import Node


def check_nodes(draft: Draft) -> Iterator[Problem]:
    for index, node in draft.each_node():
        path: KeyPath = ("nodes", index)
        yield from _check_options(draft, node, path)
        yield from check_vote(draft, node, path)
        yield from _check_agent_options(draft, node, path)
        yield from _check_env_route(draft, node, path)


def _check_options(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    problem, role, kind = draft.source.problem, node.node_role, KINDS[node.node_role]
    for key in ("agent", "agent_group"):
        if (kind.convention or role is NodeRole.VOTE) and draft.has(*path, key):
            yield problem((*path, key), f"a {role} node does not belong to one agent; remove `{key}`", key=True)
    if node.only_forward_compute and kind.forward_step is None:
        yield problem((*path, "only_forward_compute"), "only MODEL_TRAIN nodes read this; remove it", key=True)
    if node.executable_ref is None and kind.convention:
        message = f"a {role} node needs `executable_ref: file.py:function`"
        if not draft.has(*path, "node_role"):
            message = "the node has no kind; add `agent:`, `reward:`, `vote:`, `compute:` or `workflow:`"
        yield problem(path, message)
    for key in ("executable_ref", "executable_kwargs"):
        if not kind.convention and draft.has(*path, key):
            hint = "; a class goes under `hooks`" if role is NodeRole.ROLLOUT else "; remove it"
            message = f"only REWARD and DEFAULT nodes read this, and this is a {role} node{hint}"
            yield problem((*path, key), message, key=True)
    if role is not NodeRole.REWARD and draft.has(*path, "scope"):
        message = f"only REWARD nodes read this, and this is a {role} node; remove it"
        yield problem((*path, "scope"), message, key=True)
    if node.when is not None and role not in EPISODE_ROLES:
        message = f"a {role} node always runs; remove `when`, which is for nodes of the episode"
        yield problem((*path, "when"), message, key=True)


def _check_agent_options(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    problem, rollout = draft.source.problem, node.node_role is NodeRole.ROLLOUT
    options_path: KeyPath = (*path, "agent_options")
    if not rollout:
        if any(draft.has(*options_path, key) for key in type(node.agent_options).model_fields):
            message = f"only ROLLOUT nodes read agent_options, and this is a {node.node_role} node; remove it"
            yield problem(options_path, message, key=True)
        return
    envs = {env for _, other in draft.each_node() for env in other.agent_options.env_path}
    if draft.complete and node.agent_options.obs_with_env and not envs:
        message = "no node has an env; add `env: file.py:Class` or remove it"
        yield problem((*options_path, "obs_with_env"), message, key=True)
    # An entry that could not be read was reported; the list may be empty without it.
    env_path_location = problem((*options_path, "env_path"), "").where
    unread = any(earlier.where.startswith(env_path_location) for earlier in draft.problems)
    if node.agent_options.rewards_with_env and not node.agent_options.env_path and not unread:
        message = "this node does not step an env; move this to the node with `env`, or add `env: file.py:Class`"
        yield problem((*options_path, "rewards_with_env"), message, key=True)


def _check_env_route(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    problem, options = draft.source.problem, node.agent_options
    options_path: KeyPath = (*path, "agent_options")
    for index, entry in enumerate(options.env_path):
        if entry in options.env_path[:index]:
            yield problem((*options_path, "env_path", index), f"`{entry}` is listed twice; remove one")
        elif names_env(entry) and entry not in draft.envs:
            hint = did_you_mean(entry, draft.envs) if draft.envs else "; declare it there, or write `file.py:Class`"
            yield problem((*options_path, "env_path", index), f"there is no `{entry}` under `envs`{hint}")
    if len(options.env_path) > 1 and options.env_route is None and not draft.has(*options_path, "env_route"):
        message = "several envs need `env_route: <path into the sample>`, which selects the env of an episode"
        yield problem((*options_path, "env_path"), message, key=True)
    if options.env_route is not None:
        if len(options.env_path) < 2:
            message = "`env_route` has no effect with fewer than two envs; name several under `env`, or remove it"
            yield problem((*options_path, "env_route"), message, key=True)
        if not all(options.env_route.split(".")):
            message = "write a path into the sample, such as `data_source` or `extra_info.env`"
            yield problem((*options_path, "env_route"), message)
