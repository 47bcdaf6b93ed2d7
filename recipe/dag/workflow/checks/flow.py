"""Who waits for whom: dependencies exist, nothing waits for itself, the episode comes before its score and that before
training.

Invariant: a graph that passes can run, and something is rolled out and scored.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, find_cycles, graph_of
from recipe.dag.workflow.problem import KeyPath, Problem
from recipe.dag.workflow.schema import EPISODE_ROLES, NodeRole

SCORED = (*EPISODE_ROLES, NodeRole.REWARD)
"""Roles that run per episode; the others train."""


def check_dependencies(draft: Draft) -> Iterator[Problem]:
    """Dependencies that do not exist, and cycles."""
    say = draft.source.problem
    for index, node in draft.each_node():
        for position, dependency in enumerate(node.dependencies):
            at: KeyPath = ("nodes", index, "dependencies", position)
            if dependency == node.node_id and draft.node_ids.count(dependency) == 1:
                yield say(at, "a node cannot depend on itself")
            elif draft.missing(dependency):
                yield say(at, draft.no_node(at, dependency, but=node.node_id))
            elif dependency in node.dependencies[:position]:
                yield say(at, f"`{dependency}` is listed twice")
    if len(set(draft.node_ids)) < len(draft.node_ids):
        return
    graph = {n.node_id: tuple(d for d in n.dependencies if d != n.node_id) for _, n in draft.each_node()}
    for cycle in find_cycles(graph):
        index = draft.node_ids.index(cycle[0])
        message = f"cycle: {' -> '.join(cycle)}; remove one of these dependencies (to repeat nodes, use `loops`)"
        yield say(("nodes", index, "dependencies"), message, key=True)


def check_flow(draft: Draft) -> Iterator[Problem]:
    """Needs a whole draft and a graph without cycles."""
    say, nodes = draft.source.problem, draft.by_id()
    graph = graph_of(nodes.values())
    for index, node in draft.each_node():
        for position, dependency in enumerate(node.dependencies):
            at, role = ("nodes", index, "dependencies", position), nodes[dependency].node_role
            if node.node_role in EPISODE_ROLES and role not in EPISODE_ROLES:
                message = (
                    f"a {node.node_role} node runs inside the episode, it cannot depend on `{dependency}` ({role})"
                )
                yield say(at, message)
            elif node.node_role in SCORED and role not in SCORED:
                message = f"a {node.node_role} node runs before training, it cannot depend on `{dependency}` ({role})"
                yield say(at, message)
        behind = {nodes[name].node_role for name in ancestors(graph, node.node_id)}
        if node.node_role is NodeRole.REWARD and NodeRole.ROLLOUT not in behind:
            place = ("nodes", index, "dependencies") if draft.has("nodes", index, "dependencies") else ("nodes", index)
            yield say(place, "a reward node must depend on the rollout nodes whose episode it scores")
    roles = {node.node_role for node in nodes.values()}
    if NodeRole.ROLLOUT not in roles:
        yield say(("nodes",), "there is no rollout node (node_type: MODEL_INFERENCE, node_role: ROLLOUT)", key=True)
    trained = any(not policy.frozen for _, policy in draft.each_policy())
    envs = [node.agent_options for node in nodes.values() if node.agent_options.env_path]
    scored = NodeRole.REWARD in roles or any(options.rewards_with_env for options in envs)
    # A compute node that says neither its role nor its function may have been meant to score.
    unclear = any(n.node_role is NodeRole.DEFAULT and n.executable_ref is None for n in nodes.values())
    if trained and not scored and not unclear:
        message = "nothing scores the episode; add a REWARD node or `rewards_with_env: true`, or freeze the policies"
        yield say(("nodes",), message, key=True)
    if scored and NodeRole.REWARD not in roles:
        yield from _check_players(draft)


def _check_players(draft: Draft) -> Iterator[Problem]:
    """Where envs alone reward: each agent that learns plays one, unless credit or sharing brings it another's."""
    algorithm = draft.algorithm
    if algorithm.spans_policies or algorithm.share_reward_in_agent:
        return
    players = {
        node.agent_group
        for _, node in draft.each_node()
        if node.agent_options.obs_with_env or node.agent_options.rewards_with_env
    }
    for index, node in draft.each_node():
        agent = draft.agents[node.agent_group]
        frozen = draft.policies[agent.policy].frozen
        if node.node_role is NodeRole.ROLLOUT and node.agent_group not in players and not frozen:
            players.add(node.agent_group)
            message = (
                f"nothing rewards agent `{agent.name}`, which is trained: let it play the env (`agent_options: "
                "{obs_with_env: true}`), or add a REWARD node"
            )
            yield draft.source.problem(("nodes", index), message)
