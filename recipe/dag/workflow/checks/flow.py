"""Checks of the graph: dependencies exist and contain no cycle, and the order is episode, scoring, training.

Invariant: a graph that passes can run, and contains nodes that are rolled out and scored.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, find_cycles, graph_of
from recipe.dag.workflow.node_kinds import EPISODE_ROLES, NodeRole

SCORED = (*EPISODE_ROLES, NodeRole.REWARD)
"""Roles that run once per episode; nodes of other roles train."""


def check_dependencies(draft: Draft) -> Iterator[Problem]:
    """Check that dependencies exist and contain no cycle."""
    problem = draft.source.problem
    for index, node in draft.each_node():
        for position, dependency in enumerate(node.dependencies):
            path: KeyPath = ("nodes", index, "dependencies", position)
            if dependency == node.node_id and draft.node_ids.count(dependency) == 1:
                yield problem(path, "a node cannot depend on itself; remove this (to repeat nodes, use `loops`)")
            elif draft.missing(dependency):
                yield problem(path, draft.no_node(path, dependency, excluded=node.node_id))
            elif dependency in node.dependencies[:position]:
                yield problem(path, f"`{dependency}` is listed twice; remove one")
    if len(set(draft.node_ids)) < len(draft.node_ids):
        return
    graph = {n.node_id: tuple(d for d in n.dependencies if d != n.node_id) for _, n in draft.each_node()}
    for cycle in find_cycles(graph):
        index = draft.node_ids.index(cycle[0])
        message = f"cycle: {' -> '.join(cycle)}; remove one of these dependencies (to repeat nodes, use `loops`)"
        yield problem(("nodes", index, "dependencies"), message, key=True)


def check_flow(draft: Draft) -> Iterator[Problem]:
    """Check the order of roles and that episodes are scored. Needs a complete draft and a graph without cycles."""
    problem, nodes = draft.source.problem, draft.by_id()
    graph = graph_of(nodes.values())
    for index, node in draft.each_node():
        for position, dependency in enumerate(node.dependencies):
            path, role = ("nodes", index, "dependencies", position), nodes[dependency].node_role
            if node.node_role in EPISODE_ROLES and role not in EPISODE_ROLES:
                message = (
                    f"a {node.node_role} node runs inside the episode, it cannot depend on `{dependency}` ({role})"
                )
                yield problem(path, message)
            elif node.node_role in SCORED and role not in SCORED:
                message = f"a {node.node_role} node runs before training, it cannot depend on `{dependency}` ({role})"
                yield problem(path, message)
        earlier_roles = {nodes[name].node_role for name in ancestors(graph, node.node_id)}
        if node.node_role is NodeRole.REWARD and NodeRole.ROLLOUT not in earlier_roles:
            path = ("nodes", index, "dependencies") if draft.has("nodes", index, "dependencies") else ("nodes", index)
            yield problem(path, "a reward node must depend on the rollout nodes whose episode it scores")
    yield from _check_scoring(draft)


def _check_scoring(draft: Draft) -> Iterator[Problem]:
    """Check that there is a rollout node and, if a policy is trained, a reward."""
    nodes = draft.by_id()
    roles = {node.node_role for node in nodes.values()}
    if NodeRole.ROLLOUT not in roles:
        message = "there is no rollout node; add one, such as `{id: solve, agent: NAME}`"
        yield draft.source.problem(("nodes",), message, key=True)
    trained = any(not policy.frozen for _, policy in draft.each_policy())
    envs = [node.agent_options for node in nodes.values() if node.agent_options.env_path]
    scored = NodeRole.REWARD in roles or any(options.rewards_with_env for options in envs)
    # A compute node without a function was reported; it may have been meant as a reward node.
    unclear = any(n.node_role is NodeRole.DEFAULT and n.executable_ref is None for n in nodes.values())
    if trained and not scored and not unclear:
        message = (
            "nothing scores the episode; add a node with `reward: file.py:function`, set `env_pays: true` on the node "
            "that steps an env, or freeze the policies"
        )
        yield draft.source.problem(("nodes",), message, key=True)
    if scored and NodeRole.REWARD not in roles:
        yield from _check_players(draft)


def _check_players(draft: Draft) -> Iterator[Problem]:
    """Check, if envs alone reward, that each trained agent plays one, unless it gets the rewards of other agents."""
    algorithm = draft.algorithm
    if algorithm.spans_policies or algorithm.share_reward_in_agent:
        return
    players = {
        node.agent_group
        for _, node in draft.each_node()
        if node.agent_options.obs_with_env or node.agent_options.rewards_with_env
    }
    for index, node in draft.each_node():
        agent = draft.agent(node.agent_group)
        frozen = draft.policy(agent.policy).frozen
        if node.node_role is NodeRole.ROLLOUT and node.agent_group not in players and not frozen:
            players.add(node.agent_group)
            message = (
                f"nothing rewards agent `{agent.name}`, which is trained; let it play the env (`sees_env: true`), or "
                "add a node with `reward: file.py:function`"
            )
            yield draft.source.problem(("nodes", index), message)
