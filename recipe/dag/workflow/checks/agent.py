"""Checks of agents (policy, sampling, tool loop, rollout nodes) and envs.

Invariant: an agent that passes has valid sampling options and at least one rollout node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.agent_schema import NEUTRAL, Agent
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, graph_of


def check_agents(draft: Draft) -> Iterator[Problem]:
    for index, agent in draft.each_agent():
        path: KeyPath = ("agents", index)
        yield from _check_sampling(draft, agent, path)
        yield from _check_effects(draft, agent, path)
        if draft.complete and not any(node.agent == agent.name for _, node in draft.each_node()):
            message = f"agent `{agent.name}` has no rollout node; add one (`agent: {agent.name}`) or remove the agent"
            yield draft.source.problem((*path, "name"), message)


def _check_sampling(draft: Draft, agent: Agent, path: KeyPath) -> Iterator[Problem]:
    """Check that the policy exists and that the agent can sample from it."""
    problem = draft.source.problem
    if draft.policies and agent.policy not in draft.policies:
        hint = did_you_mean(agent.policy, draft.policies)
        yield problem((*path, "policy"), f"no policy `{agent.policy}`{hint}")
    for block in ("sampling", "validation"):
        top_k = getattr(agent, block).top_k
        if top_k is not None and top_k < 1 and top_k != -1:
            yield problem((*path, block, "top_k"), f"expected -1 (whole vocabulary) or at least 1, got {top_k}")
    policy = draft.policies.get(agent.policy)
    if policy is not None and not policy.frozen and agent.sampling.temperature == 0:
        message = "a trained policy cannot sample at temperature 0; for greedy decoding set it under `validation`"
        yield problem((*path, "sampling", "temperature"), message)
    if policy is not None and not policy.frozen and agent.sampling.thinking_tokens:
        message = "thoughts of a trained policy are trained, within `max_tokens`; raise that, and remove this"
        yield problem((*path, "sampling", "thinking_tokens"), message, key=True)


def _check_effects(draft: Draft, agent: Agent, path: KeyPath) -> Iterator[Problem]:
    """Check that the agent's options have an effect."""
    problem = draft.source.problem
    pools = "role" in draft.algorithm.grouping or draft.reported("algorithm", "group_by")
    if agent.role is not None and not pools:
        message = "`role` has no effect unless `algorithm.group_by` contains `role`; add it there, or remove this"
        yield problem((*path, "role"), message, key=True)
    policy = draft.policies.get(agent.policy)
    if agent.on_failure == "skip" and policy is not None and not policy.frozen:
        message = (
            f"`skip` is for agents whose policy is not trained, and `{agent.policy}` is trained; remove this, or set "
            "`episode.on_failure`"
        )
        yield problem((*path, "on_failure"), message)
    if agent.tool_loop is not None and not agent.tools:
        message = "a tool loop needs tools; add `tools: [code_interpreter]` or remove it"
        yield problem((*path, "tool_loop"), message, key=True)
    if agent.tool_loop is not None:
        formats = {"max_parallel": "hermes", "call_tag": "tags", "result_tag": "tags"}
        for key in (key for key in formats if draft.has(*path, "tool_loop", key)):
            if formats[key] != agent.tool_loop.format:
                message = (
                    f"has no effect with `format: {agent.tool_loop.format}`, only with `{formats[key]}`; remove it"
                )
                yield problem((*path, "tool_loop", key), message, key=True)
    if agent.memory != "none" and draft.complete:
        message = _without_effect(draft, agent) if agent.memory == "chat" else _unshared(draft, agent)
        if message is not None:
            yield problem((*path, "memory"), message, key=True)


def _without_effect(draft: Draft, agent: Agent) -> str | None:
    """Return the problem if no node of the agent is called more than once in an episode."""
    if _called_again(draft, {node.id for _, node in draft.each_node() if node.agent == agent.name}):
        return None
    return (
        "`chat` has no effect: each node of the agent is called once per episode; put one into a loop, raise "
        "`episode.max_turns`, or remove it"
    )


def _unshared(draft: Draft, agent: Agent) -> str | None:
    """Return the problem of an agent that cannot share the conversation of its policy; None if it can."""
    sharing = [other for _, other in draft.each_agent() if (other.policy, other.memory) == (agent.policy, "shared")]
    names = {other.name for other in sharing}
    nodes = [node for _, node in draft.each_node()]
    own = {node.id for node in nodes if node.agent in names}
    graph = graph_of(nodes)
    if not _called_again(draft, own) and not any(own & ancestors(graph, node) for node in own):
        return (
            f"`shared` has no effect: no call of an agent of policy `{agent.policy}` that shares its conversation "
            "follows another; let one depend on another (`after`), give both `memory: shared`, or remove it"
        )
    first = sharing[0]
    if _shown_tools(agent) != _shown_tools(first):
        return (
            f"only the first call's prompt shows tools, and `{agent.name}` and `{first.name}` show different ones; "
            "give both the same tools and `tool_loop` (`format: fenced` and `tags` show none), or remove it"
        )
    if agent.hand_over == "answer" and len(sharing) > 1:
        return "others read the thoughts in the conversation that they share; remove this, or `hand_over: answer`"
    return None


def _shown_tools(agent: Agent) -> list[str]:
    """Return the tools that the chat template shows."""
    return [tool.key for tool in agent.tools] if agent.tool_loop and agent.tool_loop.format == "hermes" else []


def _called_again(draft: Draft, own: set[str]) -> bool:
    """Return whether one of the nodes `own` may be called more than once in an episode."""
    looped = {node for _, loop in draft.each_loop() if loop.max_rounds > 1 for node in loop.nodes}
    return draft.episode.max_turns > 1 or bool(own & looped)


def warn_of_sampling(draft: Draft) -> Iterator[Problem]:
    """Warn of trained policies that sample from another distribution than the trainer's."""
    for index, agent in draft.each_agent():
        policy = draft.policies.get(agent.policy)
        if policy is None or policy.frozen:
            continue
        for key, neutral in NEUTRAL.items():
            if (value := getattr(agent.sampling, key)) != neutral:
                message = (
                    f"the trainer's log-probs ignore {key} {value:g}: tokens are sampled from another distribution "
                    "than the one in the importance ratio, which biases the updates; move it to `validation`, or "
                    f"set it to {neutral:g}"
                )
                problem = draft.source.problem(("agents", index, "sampling", key), message)
                yield replace(problem, training_only=True)


def check_envs(draft: Draft, references: References) -> Iterator[Problem]:
    """Check that every env under `envs` is used, and its class."""
    used = {entry for _, node in draft.each_node() for entry in node.env}
    for name, env in draft.envs.items():
        if env is not None:
            yield from references.check_env(env, ("envs", name))
        if draft.complete and name not in used:
            message = f"no node steps env `{name}`; name it in a node's `env` or remove it"
            yield draft.source.problem(("envs", name), message, key=True)
