"""Checks of each node's options: what its role does not read is an error.

Invariant: a node that passes has nothing that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.checks.loop import check_vote
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.paths import names_env
from recipe.dag.workflow.problem import KeyPath, Problem, did_you_mean
from recipe.dag.workflow.schema import EPISODE_ROLES, Node, NodeRole

CALLED = (NodeRole.REWARD, NodeRole.DEFAULT)
"""Roles that run a function of the user's."""
FORWARD = (NodeRole.ACTOR, NodeRole.CRITIC, NodeRole.REFERENCE)
"""Roles that have a forward pass."""


def check_nodes(draft: Draft) -> Iterator[Problem]:
    for index, node in draft.each_node():
        path: KeyPath = ("nodes", index)
        yield from _check_options(draft, node, path)
        yield from check_vote(draft, node, path)
        yield from _check_agent_options(draft, node, path)
        yield from _check_env_route(draft, node, path)


def _check_options(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    say, role = draft.source.problem, node.node_role
    for key in ("agent", "agent_group"):
        if role in (*CALLED, NodeRole.VOTE) and draft.has(*path, key):
            yield say((*path, key), "this node sees the whole episode, of all agents; remove it", key=True)
    if node.only_forward_compute and role not in FORWARD:
        yield say((*path, "only_forward_compute"), "only MODEL_TRAIN nodes read this; remove it", key=True)
    if node.executable_ref is None and role in CALLED:
        message = f"a {role} node needs `executable_ref: file.py:function`"
        if not draft.has(*path, "node_role"):
            message = "what is this node? Give it `agent:`, `reward:`, `vote:`, `compute:` or `workflow:`"
        yield say(path, message)
    for key in ("executable_ref", "executable_kwargs"):
        if role not in CALLED and draft.has(*path, key):
            hint = "; a class goes under `hooks`" if role is NodeRole.ROLLOUT else ""
            yield say((*path, key), f"only REWARD and DEFAULT nodes read this, not {role}{hint}", key=True)
    if node.when is not None and role not in EPISODE_ROLES:
        message = f"a {role} node always runs; `when` is for nodes of the episode"
        yield say((*path, "when"), message, key=True)


def _check_agent_options(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    say, rollout = draft.source.problem, node.node_role is NodeRole.ROLLOUT
    at: KeyPath = (*path, "agent_options")
    if not rollout:
        if any(draft.has(*at, key) for key in type(node.agent_options).model_fields):
            yield say(at, f"only ROLLOUT nodes read agent_options, this one is {node.node_role}; remove it", key=True)
        return
    envs = {env for _, other in draft.each_node() for env in other.agent_options.env_path}
    if draft.whole and node.agent_options.obs_with_env and not envs:
        yield say((*at, "obs_with_env"), "no node has an env; add `env_path: file.py:Class` or remove it", key=True)
    # An entry that could not be read was reported; the list may be empty without it.
    spoilt = any(problem.where.startswith(say((*at, "env_path"), "").where) for problem in draft.problems)
    if node.agent_options.rewards_with_env and not node.agent_options.env_path and not spoilt:
        message = "this node steps no env; move it to the one with `env_path`, or add that"
        yield say((*at, "rewards_with_env"), message, key=True)


def _check_env_route(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    say, options = draft.source.problem, node.agent_options
    at: KeyPath = (*path, "agent_options")
    for index, entry in enumerate(options.env_path):
        if entry in options.env_path[:index]:
            yield say((*at, "env_path", index), f"`{entry}` is listed twice")
        elif names_env(entry) and entry not in draft.envs:
            hint = did_you_mean(entry, draft.envs) if draft.envs else "; declare it there, or write `file.py:Class`"
            yield say((*at, "env_path", index), f"there is no `{entry}` under `envs`{hint}")
    if len(options.env_path) > 1 and options.env_route is None and not draft.has(*at, "env_route"):
        message = "with several envs `env_route: <path into the sample>` must say which one an episode gets"
        yield say((*at, "env_path"), message, key=True)
    if options.env_route is not None:
        if len(options.env_path) < 2:
            yield say((*at, "env_route"), "there is nothing to choose from; name several under `env_path`", key=True)
        if not all(options.env_route.split(".")):
            yield say((*at, "env_route"), "write a path into the sample, such as `data_source` or `extra_info.env`")
