"""The training chain that is derived for a workflow that declares none.

Invariant: the inputs of all updates are computed before the first update: every update depends on every forward node of
all policies. Derived ids contain a dot (`main.update`), which declared ids cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.workflow.agent_schema import Policy, critic_owners
from recipe.dag.workflow.graph import graph_of, sinks
from recipe.dag.workflow.node import Node, TrainingStep


def derive_training_chain(
    policies: Mapping[str, Policy], nodes: Sequence[Node], algorithm: Algorithm
) -> tuple[Node, ...]:
    """Return the training nodes of each policy that is not frozen, after `nodes`, in the policies' order.

    A critic has one forward and one update node, named after the policy that owns it, even if several share it. With an
    estimator that spans policies, one advantage node without a policy, `chain.advantage`, reads the values of all; with
    vdn and qmix it is `mixer.advantage`.
    """
    scored = tuple(sinks(graph_of(nodes)))
    trained = {name: policy for name, policy in policies.items() if not policy.frozen}
    if not trained:
        return ()
    owners = critic_owners(policies)

    def node(kind: TrainingStep, owner: str, after: Sequence[str]) -> Node:
        return Node(id=f"{owner}.{kind}", train=kind, after=tuple(dict.fromkeys(after)), policy=owner)

    forward: list[Node] = []
    for name, policy in trained.items():
        if algorithm.recomputes_old_log_probs:
            forward.append(node("old_log_probs", name, scored))
        if policy.reference:
            forward.append(node("reference", name, scored))
    values = {owner: node("values", owner, scored) for owner in owners.values()}
    forward += values.values()
    fixed = [step.id for step in forward]

    def inputs(members: Sequence[str]) -> list[str]:
        """Return the nodes on which the advantages of these policies' rows depend."""
        needed = [*scored, *(values[owners[name]].id for name in members if name in owners)]
        if algorithm.credit_reads_log_probs:
            log_probs = [step for step in forward if step.policy in members and step.train != "values"]
            needed += [step.id for step in log_probs]
        return needed

    if algorithm.spans_policies:
        name = "chain" if algorithm.team_value is None else "mixer"
        joint = node("advantage", name, inputs(list(trained)))
        # A policy may have the name `chain` or `mixer`; the node belongs to no policy all the same.
        advantages = dict.fromkeys(trained, joint.model_copy(update={"policy": None}))
    else:
        advantages = {name: node("advantage", name, inputs([name])) for name in trained}
    updates = [
        node("critic_update", owner, [*fixed, *(advantages[n].id for n in owners if owners[n] == owner)])
        for owner in values
    ]
    updates += [node("update", name, [*fixed, advantages[name].id]) for name in trained]
    unique = {step.id: step for step in advantages.values()}
    return (*forward, *unique.values(), *updates)


def is_derived(node_id: str) -> bool:
    """Return whether a node is part of a derived training chain."""
    return "." in node_id
