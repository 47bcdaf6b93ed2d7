"""Checks of a workflow's pieces against each other: names, options, and the graph of the episode.

Invariant: every check runs whatever the others found, and speaks only about pieces that could be read: one mistake, one
problem. Checks that need the whole file (an unused policy) wait until all of it can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, find_cycles
from recipe.dag.workflow.interpolation import check_env
from recipe.dag.workflow.overrides import check_overrides
from recipe.dag.workflow.problem import KeyPath, Problem, did_you_mean
from recipe.dag.workflow.references import References
from recipe.dag.workflow.schema import Node, NodeRole
from recipe.dag.workflow.training_checks import check_training

SCORED = (NodeRole.ROLLOUT, NodeRole.REWARD)
"""Roles that run per episode; the others train."""


def check_workflow(draft: Draft) -> list[Problem]:
    """Everything that is wrong with a draft beyond what reading its pieces found."""
    references = References(draft.source, Path(draft.source.file))
    problems = [*check_agents(draft), *check_policies(draft), *check_algorithm(draft), *check_nodes(draft)]
    problems += check_overrides(draft)
    for index, agent in draft.each_agent():
        problems += references.check_agent(agent, ("agents", index))
    for index, node in draft.each_node():
        problems += references.check_node(node, ("nodes", index))
    acyclic = True
    for problem in check_dependencies(draft):
        acyclic = False
        problems.append(problem)
    if draft.whole and acyclic:
        problems += check_flow(draft)
        problems += check_training(draft)
    return problems


def check_agents(draft: Draft) -> Iterator[Problem]:
    say = draft.source.problem
    yield from _check_names(draft, [(("agents", i, "name"), name) for i, name in enumerate(draft.agent_names)], "agent")
    for index, agent in draft.each_agent():
        path: KeyPath = ("agents", index)
        if draft.policies and agent.policy not in draft.policies:
            hint = did_you_mean(agent.policy, draft.policies)
            yield say((*path, "policy"), f"no policy `{agent.policy}`{hint}")
        for block in ("sampling", "validation"):
            top_k = getattr(agent, block).top_k
            if top_k is not None and top_k < 1 and top_k != -1:
                yield say((*path, block, "top_k"), f"expected -1 (whole vocabulary) or at least 1, got {top_k}")
        policy = draft.policies.get(agent.policy)
        if policy is not None and not policy.frozen and agent.sampling.temperature == 0:
            message = "a trained policy cannot sample at temperature 0; greedy decoding goes under `validation`"
            yield say((*path, "sampling", "temperature"), message)
        if agent.tool_loop is not None and not agent.tools:
            message = "a tool loop needs tools; add `tools: [code_interpreter]` or remove it"
            yield say((*path, "tool_loop"), message, key=True)
        for position, tool in enumerate(agent.tools):
            if tool in agent.tools[:position]:
                yield say((*path, "tools", position), f"`{tool}` is listed twice")
        if draft.whole and not any(
            node.node_role is NodeRole.ROLLOUT and node.agent_group == index for _, node in draft.each_node()
        ):
            message = f"agent `{agent.name}` has no rollout node; add one (`agent: {agent.name}`) or remove the agent"
            yield say((*path, "name"), message)


def check_policies(draft: Draft) -> Iterator[Problem]:
    say = draft.source.problem
    used = {agent.policy for _, agent in draft.each_agent()}
    yield from _check_names(draft, [(("policies", name), name) for name in draft.policies], "policy", key=True)
    for name, policy in draft.policies.items():
        path: KeyPath = ("policies", name)
        if draft.whole and name not in used:
            yield say(path, f"no agent uses policy `{name}`; give it to one or remove it", key=True)
        if policy is None:
            continue
        for key in ("path", "tokenizer_path"):
            text = getattr(policy.model, key)
            if text is not None and not text.strip():
                yield say((*path, "model", key), "must not be empty")
            elif text is not None and (wrong := check_env(text)):
                yield say((*path, "model", key), wrong)
        if policy.reference and policy.frozen:
            yield say((*path, "reference"), "a frozen policy needs no reference; remove it")
        elif policy.reference and draft.algorithm.kl_loss_coef == 0 and not _algorithm_unread(draft, "kl_loss_coef"):
            message = "nobody reads the reference while algorithm.kl_loss_coef is 0; set that or remove `reference`"
            yield say((*path, "reference"), message)
        elif not policy.reference and not policy.frozen and draft.algorithm.kl_loss_coef > 0:
            message = f"algorithm.kl_loss_coef is above 0, so policy `{name}` needs `reference: true`"
            yield say(path, message, key=True)


def check_algorithm(draft: Draft) -> Iterator[Problem]:
    algorithm = draft.algorithm
    for position, key in enumerate(algorithm.group_by):
        if key in algorithm.group_by[:position]:
            yield draft.source.problem(("algorithm", "group_by", position), f"`{key}` is listed twice")
    unread = {"gamma"} if algorithm.estimator == "grpo" else {"center", "scale"}
    if algorithm.estimator != "grpo" and not algorithm.drop_zero_variance:
        unread |= {"group_by", "stat_unit"}
    for key in sorted(unread):
        if draft.has("algorithm", key):
            message = f"estimator `{algorithm.estimator}` does not read this; remove it or choose another estimator"
            yield draft.source.problem(("algorithm", key), message, key=True)


def check_nodes(draft: Draft) -> Iterator[Problem]:
    yield from _check_names(draft, [(("nodes", i, "node_id"), name) for i, name in enumerate(draft.node_ids)], "node")
    for index, node in draft.each_node():
        yield from _check_node(draft, node, ("nodes", index))


def _check_node(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    say, role = draft.source.problem, node.node_role
    scores = role is NodeRole.REWARD
    for key in ("agent", "agent_group"):
        if scores and draft.has(*path, key):
            yield say((*path, key), "this node sees the whole episode, of all agents; remove it", key=True)
    if node.only_forward_compute and role not in (NodeRole.ACTOR, NodeRole.REFERENCE):
        yield say((*path, "only_forward_compute"), "only MODEL_TRAIN nodes read this; remove it", key=True)
    if node.executable_ref is None and scores:
        yield say(path, f"a {role} node needs `executable_ref: file.py:function`")
    for key in ("executable_ref", "executable_kwargs"):
        if not scores and draft.has(*path, key):
            hint = "; hooks go under agent_options.process_path" if role is NodeRole.ROLLOUT else ""
            yield say((*path, key), f"only REWARD nodes read this, not {role}{hint}", key=True)
    yield from _check_agent_options(draft, node, path)


def _check_agent_options(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    say, rollout = draft.source.problem, node.node_role is NodeRole.ROLLOUT
    at: KeyPath = (*path, "agent_options")
    later = {
        "train_cycle": "train_cycle is not supported yet: every trained policy updates at every step; remove it",
        "share_instance": "share_instance comes with the critic methods; remove it (`policy` shares weights)",
    }
    given = [key for key in type(node.agent_options).model_fields if draft.has(*at, key)]
    for key in later:
        if key in given:
            yield say((*at, key), later[key], key=True)
    if not rollout and set(given) - set(later):
        yield say(at, f"only ROLLOUT nodes read agent_options, this one is {node.node_role}; remove it", key=True)
    if len(node.agent_options.env_path) > 1:
        yield say((*at, "env_path", 1), "a node steps one env; give each further one its own node")
    envs = {env for _, other in draft.each_node() for env in other.agent_options.env_path}
    if draft.whole and rollout and node.agent_options.obs_with_env and not envs:
        yield say((*at, "obs_with_env"), "no node has an env; add `env_path: file.py:Class` or remove it", key=True)
    if rollout and node.agent_options.rewards_with_env and not draft.has(*at, "env_path"):
        message = "this node steps no env; move it to the one with `env_path`, or add that"
        yield say((*at, "rewards_with_env"), message, key=True)


def check_dependencies(draft: Draft) -> Iterator[Problem]:
    """Dependencies that do not exist, and cycles."""
    say = draft.source.problem
    for index, node in draft.each_node():
        for position, dependency in enumerate(node.dependencies):
            at: KeyPath = ("nodes", index, "dependencies", position)
            if dependency == node.node_id and draft.node_ids.count(dependency) == 1:
                yield say(at, "a node cannot depend on itself")
            elif dependency not in draft.node_ids:
                others = [name for name in draft.node_ids if name and name != node.node_id]
                yield say(at, f"no node `{dependency}`{did_you_mean(dependency, others)}")
            elif dependency in node.dependencies[:position]:
                yield say(at, f"`{dependency}` is listed twice")
    if len(set(draft.node_ids)) < len(draft.node_ids):
        return
    graph = {n.node_id: tuple(d for d in n.dependencies if d != n.node_id) for _, n in draft.each_node()}
    for cycle in find_cycles(graph):
        index = draft.node_ids.index(cycle[0])
        message = f"cycle: {' -> '.join(cycle)}; remove one of these dependencies (rounds are `episode.max_turns`)"
        yield say(("nodes", index, "dependencies"), message, key=True)


def check_flow(draft: Draft) -> Iterator[Problem]:
    """Who may wait for whom inside an episode, and that something is rolled out and scored."""
    say = draft.source.problem
    nodes = {node.node_id: node for _, node in draft.each_node()}
    graph = {name: node.dependencies for name, node in nodes.items()}
    for index, node in draft.each_node():
        for position, dependency in enumerate(node.dependencies):
            at, role = ("nodes", index, "dependencies", position), nodes[dependency].node_role
            if node.node_role is NodeRole.ROLLOUT and role is not NodeRole.ROLLOUT:
                message = f"a rollout node may depend on rollout nodes only, `{dependency}` is {role}"
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
    trained = any(policy is not None and not policy.frozen for policy in draft.policies.values())
    scored = NodeRole.REWARD in roles or any(node.agent_options.rewards_with_env for node in nodes.values())
    if trained and not scored:
        message = "nothing scores the episode; add a REWARD node or `rewards_with_env: true`, or freeze the policies"
        yield say(("nodes",), message, key=True)


def _check_names(draft: Draft, names: list[tuple[KeyPath, str]], kind: str, *, key: bool = False) -> Iterator[Problem]:
    seen: set[str] = set()
    for path, name in names:
        if draft.has(*path) and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) and (name or key):
            message = f"`{name}` is no name; use letters, digits, `_` and `-` (it names metrics and folders)"
            yield draft.source.problem(path, message, key=key)
        elif name in seen:
            yield draft.source.problem(path, f"another {kind} is called `{name}`; names must differ", key=key)
        if name:
            seen.add(name)


def _algorithm_unread(draft: Draft, key: str) -> bool:
    """The user wrote the option, but it could not be read."""
    return any(problem.where == f"algorithm.{key}" for problem in draft.problems)
