"""Checks of an explicit training chain; where no training node is declared there is nothing to check.

Invariant: a chain that passes updates every trained policy once per step, with its advantages known and its behaviour
log-probs fixed before.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors
from recipe.dag.workflow.problem import KeyPath, Problem, did_you_mean
from recipe.dag.workflow.schema import Node, NodeRole

TRAINING = (NodeRole.ADVANTAGE, NodeRole.ACTOR, NodeRole.REFERENCE)


def policy_of(draft: Draft, index: int, node: Node) -> str | None:
    """The policy a training node acts on; None where the file leaves it open or names none that exists."""
    if node.policy is not None:
        return node.policy if node.policy in draft.policies else None
    if not _names_agent(draft, index) and len(draft.policies) > 1:
        return None
    agent = draft.agents[node.agent_group] if draft.agents else None
    return agent.policy if agent is not None and agent.policy in draft.policies else None


def check_training(draft: Draft) -> Iterator[Problem]:
    yield from _check_policy_keys(draft)
    training = [(index, node) for index, node in draft.each_node() if node.node_role in TRAINING]
    if not training:
        return
    owners = {node.node_id: policy_of(draft, index, node) for index, node in training}
    if None in owners.values():
        return
    graph = {node.node_id: node.dependencies for _, node in draft.each_node()}
    for name, policy in draft.policies.items():
        mine = [(index, node) for index, node in training if owners[node.node_id] == name]
        if policy is not None and policy.frozen:
            for index, _ in mine:
                message = f"policy `{name}` is frozen and cannot be trained; remove this node or `frozen`"
                yield draft.source.problem(("nodes", index), message)
        elif policy is not None:
            yield from _check_chain(draft, name, policy.reference, mine, graph)


def _check_policy_keys(draft: Draft) -> Iterator[Problem]:
    say = draft.source.problem
    for index, node in draft.each_node():
        at: KeyPath = ("nodes", index, "policy")
        trains = node.node_role in TRAINING
        if node.policy is not None and not trains:
            yield say(at, "only training nodes name a policy; a rollout node has its agent's", key=True)
        elif node.policy is not None and node.policy not in draft.policies:
            yield say(at, f"no policy `{node.policy}`{did_you_mean(node.policy, draft.policies)}")
        elif node.policy is not None and _names_agent(draft, index):
            agent = draft.agents[node.agent_group]
            if agent is not None and agent.policy != node.policy:
                message = f"agent `{agent.name}` has policy `{agent.policy}`; name the agent or the policy, not both"
                yield say(at, message)
        elif trains and node.policy is None and not _names_agent(draft, index) and len(draft.policies) > 1:
            message = "say whose node this is: `policy: name` (or `agent: name`)"
            yield say(("nodes", index), message)


def _check_chain(
    draft: Draft, name: str, reference: bool, mine: list[tuple[int, Node]], graph: dict[str, tuple[str, ...]]
) -> Iterator[Problem]:
    say = draft.source.problem

    def of(role: NodeRole, forward: bool | None = None) -> list[tuple[int, Node]]:
        return [(i, n) for i, n in mine if n.node_role is role and forward in (None, n.only_forward_compute)]

    advantages, updates = of(NodeRole.ADVANTAGE), of(NodeRole.ACTOR, False)
    forwards, references = of(NodeRole.ACTOR, True), of(NodeRole.REFERENCE)
    parts = (("ADVANTAGE node", advantages), ("ACTOR update node", updates))
    for what, found in parts:
        if not found:
            message = f"policy `{name}` has no {what}; declare the whole training chain, or no training node at all"
            yield say(("policies", name), message, key=True)
    for what, found in (*parts, ("ACTOR forward node", forwards), ("REFERENCE node", references)):
        for index, _ in found[1:]:
            yield say(("nodes", index), f"policy `{name}` has another {what}, `{found[0][1].node_id}`; keep one")
    for index, _ in references:
        if not reference:
            message = f"policy `{name}` keeps no reference; set `reference: true` (and kl_loss_coef) or remove this"
            yield say(("nodes", index), message)
    if reference and not references:
        yield say(("policies", name), f"policy `{name}` has a reference, but no REFERENCE node computes it", key=True)
    for index, update in updates[:1]:
        before = ancestors(graph, update.node_id)
        for _, needed in (*advantages[:1], *forwards[:1], *references[:1]):
            if needed.node_id not in before:
                message = f"the update must wait for `{needed.node_id}`; add it to `dependencies`"
                yield say(("nodes", index), message)
    rewards = {node.node_id for _, node in draft.each_node() if node.node_role is NodeRole.REWARD}
    for index, advantage in advantages[:1]:
        missing = sorted(rewards - ancestors(graph, advantage.node_id))
        if missing:
            yield say(("nodes", index), f"advantages need the rewards; add `{missing[0]}` to `dependencies`")


def _names_agent(draft: Draft, index: int) -> bool:
    return draft.has("nodes", index, "agent") or draft.has("nodes", index, "agent_group")
