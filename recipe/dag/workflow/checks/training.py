"""Checks of a declared training chain. A workflow without training nodes has a derived one, which needs no checks.

Invariant: a chain that passes updates every trained policy once per step, after its advantages and after every pass
whose result depends on the weights before the first update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.agent_schema import critic_owners
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, graph_of
from recipe.dag.workflow.node import CRITIC_KINDS, TRAINING_KINDS, Kind, Node

Placed = tuple[int, Node]
"""A node with its index in the file."""


def policy_of(draft: Draft, node: Node) -> str | None:
    """Return the policy that a training node acts on; None if the file names none that exists, and for the advantage
    node of an estimator that spans policies."""
    if serves_all(draft, node):
        return None
    name = node.policy or (next(iter(draft.policies)) if len(draft.policies) == 1 else None)
    return name if name in draft.policies else None


def serves_all(draft: Draft, node: Node) -> bool:
    return node.kind is Kind.ADVANTAGE and draft.algorithm.spans_policies


def check_training(draft: Draft) -> Iterator[Problem]:
    """Needs a complete draft and a graph without cycles."""
    training = [(index, node) for index, node in draft.each_node() if node.kind in TRAINING_KINDS]
    yield from _check_policy_keys(draft, training)
    shared = [(index, node) for index, node in training if serves_all(draft, node)]
    owners = {node.id: policy_of(draft, node) for index, node in training if (index, node) not in shared}
    if None in owners.values():
        return
    if draft.algorithm.spans_policies and len(shared) != 1:
        at = ("nodes", shared[1][0]) if shared else ("nodes",)
        message = f"{draft.algorithm.estimator} has one `train: advantage`, for all policies; declare that one"
        yield draft.source.problem(at, message, key=not shared)
    steps = {}
    for name, policy in draft.each_policy():
        policy_nodes = [(index, node) for index, node in training if owners.get(node.id) == name]
        if policy.frozen:
            for index, _ in policy_nodes:
                message = f"policy `{name}` is frozen and cannot be trained; remove this node or `frozen`"
                if policy.api is not None:
                    message = f"policy `{name}` is an API and cannot be trained; remove this node"
                yield draft.source.problem(("nodes", index), message)
        else:
            steps[name] = Steps(name, policy_nodes, shared)
            yield from _check_parts(draft, steps[name])
            yield from _check_models(draft, steps[name])
    yield from _check_old_log_probs(draft, steps)
    yield from _check_order(draft, steps)
    yield from _check_advantages(draft, steps)


@dataclass(slots=True)
class Steps:
    """The training nodes of one policy."""

    policy: str
    nodes: list[Placed]
    shared: list[Placed] = field(default_factory=list)
    """The advantage nodes that serve all policies."""

    def of(self, *kinds: Kind) -> list[Placed]:
        return [(index, node) for index, node in self.nodes if node.kind in kinds]

    @property
    def advantages(self) -> list[Placed]:
        return self.shared or self.of(Kind.ADVANTAGE)

    @property
    def fixed(self) -> list[Placed]:
        """The passes that must run before the first update of any policy."""
        kinds = (Kind.OLD_LOG_PROBS, Kind.REFERENCE, Kind.VALUES)
        return [placed for kind in kinds for placed in self.of(kind)[:1]]


def check_forward_passes(draft: Draft, path: KeyPath) -> Iterator[Problem]:
    """Yield a problem at `path` if a declared training chain updates a policy without its old log-probs."""
    kinds = [node.kind for _, node in draft.each_node()]
    if kinds.count(Kind.UPDATE) > kinds.count(Kind.OLD_LOG_PROBS):
        message = "every policy needs a node with `train: old_log_probs`; add the missing ones"
        yield draft.source.problem(path, message, key=True)


def _check_policy_keys(draft: Draft, training: list[Placed]) -> Iterator[Problem]:
    say = draft.source.problem
    for index, node in training:
        at: KeyPath = ("nodes", index, "policy")
        if serves_all(draft, node):
            if node.policy is not None:
                message = f"under {draft.algorithm.estimator} this node serves all policies; remove this key"
                yield say(at, message, key=True)
        elif node.policy is None and len(draft.policies) > 1:
            yield say(("nodes", index), "several policies could be meant; add `policy: NAME`")
        elif node.policy is not None and node.policy not in draft.policies:
            yield say(at, f"no policy `{node.policy}`{did_you_mean(node.policy, draft.policies)}")


def _check_parts(draft: Draft, steps: Steps) -> Iterator[Problem]:
    """Check that each kind of node that the policy needs occurs, and none occurs twice."""
    say, name = draft.source.problem, steps.policy
    needed = [Kind.UPDATE]
    if not steps.shared and not draft.algorithm.spans_policies:
        needed.append(Kind.ADVANTAGE)
    if critic_owners(dict(draft.each_policy())).get(name) == name:
        needed += [Kind.VALUES, Kind.CRITIC_UPDATE]
    for kind in needed:
        if not steps.of(kind):
            message = f"policy `{name}` has no `train: {kind}`; declare the whole training chain, or no training node"
            yield say(("policies", name), message, key=True)
    for kind in (*needed, Kind.OLD_LOG_PROBS, Kind.REFERENCE):
        nodes = steps.of(kind)
        for index, _ in nodes[1:]:
            yield say(("nodes", index), f"policy `{name}` has another `train: {kind}`, `{nodes[0][1].id}`; keep one")


def _check_models(draft: Draft, steps: Steps) -> Iterator[Problem]:
    """Check that the policy's nodes have the reference and the critic that they compute with."""
    say, name, policy = draft.source.problem, steps.policy, draft.policy(steps.policy)
    references = steps.of(Kind.REFERENCE)
    for index, _ in references:
        if not policy.reference:
            message = f"policy `{name}` keeps no reference; set `reference: true` (and kl_loss_coef) or remove this"
            yield say(("nodes", index), message)
    if policy.reference and not references:
        yield say(("policies", name), f"policy `{name}` has a reference that no `train: reference` computes", key=True)
    owner = critic_owners(dict(draft.each_policy())).get(name)
    for index, _ in () if owner == name else steps.of(*CRITIC_KINDS):
        message = f"policy `{name}` has no critic; give it `critic: {{}}` or remove this"
        if owner is not None:
            message = f"policy `{name}` shares the critic of `{owner}`, whose nodes do this; remove it"
        yield say(("nodes", index), message)


def _check_old_log_probs(draft: Draft, steps: dict[str, Steps]) -> Iterator[Problem]:
    """Check the option `old_log_probs` against the nodes: a declared chain decides whether they are recomputed."""
    at: KeyPath = ("algorithm", "old_log_probs")
    for name, policy_steps in steps.items() if draft.has(*at) else ():
        passes = policy_steps.of(Kind.OLD_LOG_PROBS)
        if draft.algorithm.old_log_probs == "trainer" and not passes:
            message = (
                f"policy `{name}` has no `train: old_log_probs`, so its servers' log-probs are used; add one, or write "
                "`rollout`"
            )
            yield draft.source.problem(at, message)
        elif draft.algorithm.old_log_probs == "rollout" and passes:
            node = passes[0][1].id
            message = f"`{node}` recomputes the log-probs of policy `{name}`; remove it, or write `trainer`"
            yield draft.source.problem(at, message)


def _check_order(draft: Draft, steps: dict[str, Steps]) -> Iterator[Problem]:
    """Check that every update waits for its advantages, and for the passes of all policies."""
    owners = critic_owners(dict(draft.each_policy()))
    fixed = [node for policy_steps in steps.values() for _, node in policy_steps.fixed]

    def advantages(members: list[str]) -> list[Node]:
        nodes = [node for name in members for _, node in steps[name].advantages[:1]]
        return list({node.id: node for node in nodes}.values())

    for name, policy_steps in steps.items():
        for placed in policy_steps.of(Kind.UPDATE)[:1]:
            yield from _late(draft, placed, [*advantages([name]), *fixed], "the update must wait for")
        sharers = [member for member in steps if owners.get(member) == name]
        for placed in policy_steps.of(Kind.CRITIC_UPDATE)[:1] if sharers else ():
            yield from _late(draft, placed, [*advantages(sharers), *fixed], "the update must wait for")


def _check_advantages(draft: Draft, steps: dict[str, Steps]) -> Iterator[Problem]:
    """Check that each advantage node waits for the rewards, and for the passes that it reads."""
    owners = critic_owners(dict(draft.each_policy()))
    rewards = [node for _, node in draft.each_node() if node.kind is Kind.REWARD]
    members_of: dict[str, tuple[Placed, list[str]]] = {}
    for name, policy_steps in steps.items():
        for placed in policy_steps.advantages[:1]:
            members_of.setdefault(placed[1].id, (placed, list(steps) if policy_steps.shared else [name]))
    for placed, members in members_of.values():
        yield from list(_late(draft, placed, rewards, "advantages need the rewards of"))[:1]
        critics = dict.fromkeys(owners[member] for member in members if member in owners)
        needed = [node for owner in critics if owner in steps for _, node in steps[owner].of(Kind.VALUES)[:1]]
        if draft.algorithm.credit_reads_log_probs:
            passes = [node for member in members for _, node in steps[member].fixed]
            needed += [node for node in passes if node.kind is not Kind.VALUES]
        yield from _late(draft, placed, needed, "advantages need the result of")


def _late(draft: Draft, placed: Placed, needed: list[Node], requirement: str) -> Iterator[Problem]:
    """Yield a problem for each node of `needed` that the node does not wait for."""
    index, node = placed
    before = ancestors(graph_of(node for _, node in draft.each_node()), node.id)
    for other in needed:
        if other.id not in before:
            message = f"{requirement} `{other.id}`; add it to `after`"
            yield draft.source.problem(("nodes", index), message)
