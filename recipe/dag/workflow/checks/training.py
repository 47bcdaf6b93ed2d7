"""Checks of an explicit training chain; where no training node is declared there is nothing to check.

Invariant: a chain that passes updates every trained policy once per step, with its advantages known and all that the
updates learn from fixed before the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, graph_of
from recipe.dag.workflow.problem import KeyPath, Problem, did_you_mean
from recipe.dag.workflow.schema import Node, NodeRole
from recipe.dag.workflow.training_chain import critic_owners

TRAINING = (NodeRole.ADVANTAGE, NodeRole.ACTOR, NodeRole.CRITIC, NodeRole.REFERENCE)

Placed = tuple[int, Node]
"""A node and its place in the file."""


def policy_of(draft: Draft, index: int, node: Node) -> str | None:
    """The policy a training node acts on; None where the file leaves it open or names none that exists, and of the one
    advantage node of an estimator that spans all."""
    if serves_all(draft, node):
        return None
    if node.policy is not None:
        return node.policy if node.policy in draft.policies else None
    if not _names_agent(draft, index) and len(draft.policies) > 1:
        return None
    agent = draft.agents[node.agent_group] if draft.agents else None
    return agent.policy if agent is not None and agent.policy in draft.policies else None


def serves_all(draft: Draft, node: Node) -> bool:
    return node.node_role is NodeRole.ADVANTAGE and draft.algorithm.spans_policies


def check_training(draft: Draft) -> Iterator[Problem]:
    yield from _check_policy_keys(draft)
    training = [(index, node) for index, node in draft.each_node() if node.node_role in TRAINING]
    if not training:
        return
    shared = [(index, node) for index, node in training if serves_all(draft, node)]
    owners = {node.node_id: policy_of(draft, index, node) for index, node in training if (index, node) not in shared}
    if None in owners.values():
        return
    if draft.algorithm.spans_policies and len(shared) != 1:
        at = ("nodes", shared[1][0]) if shared else ("nodes",)
        message = f"{draft.algorithm.estimator} has one ADVANTAGE node, for all policies; declare that one"
        yield draft.source.problem(at, message, key=not shared)
    steps = {}
    for name, policy in draft.each_policy():
        mine = [(index, node) for index, node in training if owners.get(node.node_id) == name]
        if policy.frozen:
            for index, _ in mine:
                message = f"policy `{name}` is frozen and cannot be trained; remove this node or `frozen`"
                yield draft.source.problem(("nodes", index), message)
        else:
            steps[name] = Steps(name, mine, shared)
            yield from _check_parts(draft, steps[name])
    yield from _check_old_log_probs(draft, steps)
    yield from _check_order(draft, steps)


@dataclass(slots=True)
class Steps:
    """The nodes of one policy, by what they do."""

    policy: str
    nodes: list[Placed]
    shared: list[Placed] = field(default_factory=list)

    def of(self, role: NodeRole, forward: bool | None = None) -> list[Placed]:
        return [(i, n) for i, n in self.nodes if n.node_role is role and forward in (None, n.only_forward_compute)]

    @property
    def advantages(self) -> list[Placed]:
        return self.shared or self.of(NodeRole.ADVANTAGE)

    @property
    def fixed(self) -> list[Placed]:
        """What must be known before the first update of any policy."""
        passes = self.of(NodeRole.ACTOR, True)[:1] + self.of(NodeRole.REFERENCE)[:1]
        return passes + self.of(NodeRole.CRITIC, True)[:1]


def _check_policy_keys(draft: Draft) -> Iterator[Problem]:
    say = draft.source.problem
    for index, node in draft.each_node():
        at: KeyPath = ("nodes", index, "policy")
        trains = node.node_role in TRAINING
        named = [key for key in ("policy", "agent", "agent_group") if draft.has("nodes", index, key)]
        if serves_all(draft, node):
            for key in named:
                message = f"under {draft.algorithm.estimator} this node serves all policies; remove it"
                yield say(("nodes", index, key), message, key=True)
        elif node.policy is not None and not trains:
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


def _check_parts(draft: Draft, steps: Steps) -> Iterator[Problem]:
    """Each kind of node once, and none that has nothing to work on."""
    say, name, policy = draft.source.problem, steps.policy, draft.policies[steps.policy]
    owner = critic_owners(dict(draft.each_policy())).get(name)
    needed = [("ACTOR update node", steps.of(NodeRole.ACTOR, False))]
    if not steps.shared and not draft.algorithm.spans_policies:
        needed.append(("ADVANTAGE node", steps.of(NodeRole.ADVANTAGE)))
    values, learns = steps.of(NodeRole.CRITIC, True), steps.of(NodeRole.CRITIC, False)
    if owner == name:
        needed += [("CRITIC forward node", values), ("CRITIC update node", learns)]
    for what, found in needed:
        if not found:
            message = f"policy `{name}` has no {what}; declare the whole training chain, or no training node at all"
            yield say(("policies", name), message, key=True)
    references = steps.of(NodeRole.REFERENCE)
    for what, found in (
        *needed,
        ("ACTOR forward node", steps.of(NodeRole.ACTOR, True)),
        ("REFERENCE node", references),
    ):
        for index, _ in found[1:]:
            yield say(("nodes", index), f"policy `{name}` has another {what}, `{found[0][1].node_id}`; keep one")
    for index, _ in references:
        if not policy.reference:
            message = f"policy `{name}` keeps no reference; set `reference: true` (and kl_loss_coef) or remove this"
            yield say(("nodes", index), message)
    if policy.reference and not references:
        yield say(("policies", name), f"policy `{name}` has a reference, but no REFERENCE node computes it", key=True)
    for index, _ in () if owner == name else (*values, *learns):
        message = f"policy `{name}` has no critic; give it `critic: {{}}` or remove this"
        if owner is not None:
            message = f"policy `{name}` shares the critic of `{owner}`, whose nodes do this; remove it"
        yield say(("nodes", index), message)


def _check_old_log_probs(draft: Draft, steps: dict[str, Steps]) -> Iterator[Problem]:
    """A declared chain decides itself; an option that says otherwise would be read by nobody."""
    at: KeyPath = ("algorithm", "old_log_probs")
    for name, mine in steps.items() if draft.has(*at) else ():
        passes = mine.of(NodeRole.ACTOR, True)
        if draft.algorithm.old_log_probs == "trainer" and not passes:
            message = (
                f"policy `{name}` has no ACTOR forward node, so its servers' log-probs are taken; add one "
                "(only_forward_compute: true), or write `rollout`"
            )
            yield draft.source.problem(at, message)
        elif draft.algorithm.old_log_probs == "rollout" and passes:
            message = f"`{passes[0][1].node_id}` recomputes those of policy `{name}`; remove it, or write `trainer`"
            yield draft.source.problem(at, message)


def _check_order(draft: Draft, steps: dict[str, Steps]) -> Iterator[Problem]:
    say = draft.source.problem
    graph = graph_of(node for _, node in draft.each_node())
    owners = critic_owners(dict(draft.each_policy()))
    fixed = [node for mine in steps.values() for _, node in mine.fixed]
    rewards = [node for _, node in draft.each_node() if node.node_role is NodeRole.REWARD]
    values = {name: mine.of(NodeRole.CRITIC, True)[:1] for name, mine in steps.items()}

    def advantages(members: list[str]) -> list[Node]:
        found = [node for name in members for _, node in steps[name].advantages[:1]]
        return list({node.node_id: node for node in found}.values())

    def late(index: int, node: Node, needed: list[Node], what: str) -> Iterator[Problem]:
        before = ancestors(graph, node.node_id)
        for other in needed:
            if other.node_id not in before:
                yield say(("nodes", index), f"{what} `{other.node_id}`; add it to `dependencies`")

    for name, mine in steps.items():
        for index, update in mine.of(NodeRole.ACTOR, False)[:1]:
            yield from late(index, update, [*advantages([name]), *fixed], "the update must wait for")
        sharers = [member for member in steps if owners.get(member) == name]
        for index, update in mine.of(NodeRole.CRITIC, False)[:1] if sharers else ():
            yield from late(index, update, [*advantages(sharers), *fixed], "the update must wait for")
    checked: set[str] = set()
    for name, mine in steps.items():
        members = list(steps) if mine.shared else [name]
        for index, advantage in mine.advantages[:1]:
            if advantage.node_id in checked:
                continue
            checked.add(advantage.node_id)
            yield from list(late(index, advantage, rewards, "advantages need the rewards of"))[:1]
            judges = dict.fromkeys(owners[member] for member in members if member in owners)
            needed = [node for owner in judges for _, node in values.get(owner, [])]
            if draft.algorithm.kl_reward_coef > 0:
                needed += [node for m in members for _, node in steps[m].fixed if node.node_role is not NodeRole.CRITIC]
            yield from late(index, advantage, needed, "advantages need the result of")


def _names_agent(draft: Draft, index: int) -> bool:
    return draft.has("nodes", index, "agent") or draft.has("nodes", index, "agent_group")
