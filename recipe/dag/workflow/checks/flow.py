"""Checks of the graph: dependencies exist and contain no cycle, loops repeat nodes of the episode, and the order is
episode, scoring, training.

Invariant: a graph that passes can run, and contains nodes that are rolled out and scored. A loop can run as one step:
no node outside both depends on its nodes and is a dependency of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, contract, find_cycles, graph_of
from recipe.dag.workflow.node import EPISODE_KINDS, Kind, title

SCORED = (*EPISODE_KINDS, Kind.REWARD)
"""Kinds that run once per episode; nodes of other kinds train."""


def check_dependencies(draft: Draft) -> Iterator[Problem]:
    """Check that dependencies exist and contain no cycle."""
    problem = draft.source.problem
    for index, node in draft.each_node():
        for position, dependency in enumerate(node.after):
            path: KeyPath = ("nodes", index, "after", position)
            if dependency == node.id and draft.node_ids.count(dependency) == 1:
                yield problem(path, "a node cannot depend on itself; remove this (to repeat nodes, use `loops`)")
            elif draft.missing(dependency):
                yield problem(path, draft.no_node(path, dependency, excluded=node.id))
            elif dependency in node.after[:position]:
                yield problem(path, f"`{dependency}` is listed twice; remove one")
    if len(set(draft.node_ids)) < len(draft.node_ids):
        return
    graph = {n.id: tuple(d for d in n.after if d != n.id) for _, n in draft.each_node()}
    for cycle in find_cycles(graph):
        index = draft.node_ids.index(cycle[0])
        message = f"cycle: {' -> '.join(cycle)}; remove one of these dependencies (to repeat nodes, use `loops`)"
        yield problem(("nodes", index, "after"), message, key=True)


def check_loops(draft: Draft) -> Iterator[Problem]:
    problem, nodes = draft.source.problem, draft.by_id()
    owner: dict[str, str] = {}
    for name, loop in draft.each_loop():
        path: KeyPath = ("loops", name)
        if not loop.nodes:
            yield problem((*path, "nodes"), "a loop without nodes has no effect; name some or remove it")
        if loop.until is not None and loop.max_rounds == 1:
            message = "`until` has no effect with one round; raise `max_rounds` or remove the loop"
            yield problem((*path, "until"), message, key=True)
        for index, node in enumerate(loop.nodes):
            node_path = (*path, "nodes", index)
            if draft.missing(node):
                yield problem(node_path, draft.no_node(node_path, node))
            elif node in nodes and nodes[node].kind not in EPISODE_KINDS:
                message = f"`{node}` is {title(nodes[node].kind)}; a loop repeats nodes of the episode only"
                yield problem(node_path, message)
            elif node in loop.nodes[:index]:
                yield problem(node_path, f"`{node}` is listed twice; remove one")
            elif node in owner:
                message = f"`{node}` is already in loop `{owner[node]}`; remove it from one of the loops"
                yield problem(node_path, message)
            owner.setdefault(node, name)


def check_loop_order(draft: Draft) -> Iterator[Problem]:
    """Check that each loop can run as one step. The graph must not contain a cycle."""
    graph = graph_of(node for _, node in draft.each_node())
    names = {f"loop {name}": (name, loop) for name, loop in draft.each_loop()}
    seen: set[str] = set()
    bodies = {}
    for key, (_, loop) in names.items():
        bodies[key] = [node for node in loop.nodes if node in graph and node not in seen]
        seen |= set(loop.nodes)
    for cycle in find_cycles(contract(graph, bodies)):
        start = next(index for index, node in enumerate(cycle) if node in names)
        rotated = [*cycle[start:-1], *cycle[:start], cycle[start]]
        name, between = names[rotated[0]][0], " -> ".join(f"`{n}`" for n in rotated[1:-1])
        message = (
            f"{between} depends on a node of this loop, and another node of the loop depends on it; add it to `nodes`, "
            "or remove one of these dependencies"
        )
        yield draft.source.problem(("loops", name, "nodes"), message, key=True)


def check_flow(draft: Draft) -> Iterator[Problem]:
    """Check the order of kinds and that episodes are scored. Needs a complete draft and a graph without cycles."""
    problem, nodes = draft.source.problem, draft.by_id()
    graph = graph_of(nodes.values())
    for index, node in draft.each_node():
        for position, dependency in enumerate(node.after):
            path, kind = ("nodes", index, "after", position), nodes[dependency].kind
            if node.kind in EPISODE_KINDS and kind not in EPISODE_KINDS:
                message = f"{title(node.kind)} runs inside the episode, it cannot depend on `{dependency}` ({kind})"
                yield problem(path, message)
            elif node.kind in SCORED and kind not in SCORED:
                message = f"{title(node.kind)} runs before training, it cannot depend on `{dependency}` ({kind})"
                yield problem(path, message)
        earlier = {nodes[name].kind for name in ancestors(graph, node.id)}
        if node.kind is Kind.REWARD and Kind.ROLLOUT not in earlier:
            path = ("nodes", index, "after") if draft.has("nodes", index, "after") else ("nodes", index)
            yield problem(path, "a reward node must depend on the rollout nodes whose episode it scores")
    yield from _check_scoring(draft)


def _check_scoring(draft: Draft) -> Iterator[Problem]:
    """Check that there is a rollout node and, if a policy is trained, a reward."""
    nodes = draft.by_id()
    kinds = {node.kind for node in nodes.values()}
    if Kind.ROLLOUT not in kinds:
        message = "there is no rollout node; add one, such as `{id: solve, agent: NAME}`"
        yield draft.source.problem(("nodes",), message, key=True)
    trained = any(not policy.frozen for _, policy in draft.each_policy())
    scored = Kind.REWARD in kinds or any(node.env and node.env_pays for node in nodes.values())
    if trained and not scored:
        message = (
            "nothing scores the episode; add a node with `reward: file.py:function`, set `env_pays: true` on the node "
            "that steps an env, or freeze the policies"
        )
        yield draft.source.problem(("nodes",), message, key=True)
    if scored and Kind.REWARD not in kinds:
        yield from _check_players(draft)


def _check_players(draft: Draft) -> Iterator[Problem]:
    """Check, if envs alone reward, that each trained agent plays one, unless it gets the rewards of other agents."""
    algorithm = draft.algorithm
    if algorithm.spans_policies or algorithm.share_reward_in_agent:
        return
    players = {node.agent for _, node in draft.each_node() if node.sees_env or node.env_pays}
    for index, node in draft.each_node():
        if node.agent is None or node.agent in players:
            continue
        agent = draft.agent(node)
        if not draft.policy(agent.policy).frozen:
            players.add(agent.name)
            message = (
                f"nothing rewards agent `{agent.name}`, which is trained; let it play the env (`sees_env: true`), or "
                "add a node with `reward: file.py:function`"
            )
            yield draft.source.problem(("nodes", index), message)
