"""The training chain that is derived for a workflow that declares none.

Invariant: the inputs of all updates are computed before the first update: every update depends on every forward node of
all policies. Derived ids contain a dot (`main.update`), which declared ids cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.workflow.agent_schema import Agent, Policy
from recipe.dag.workflow.graph import graph_of, sinks
from recipe.dag.workflow.node_kinds import NodeRole, NodeType
from recipe.dag.workflow.schema import Node


def critic_owners(policies: Mapping[str, Policy]) -> dict[str, str]:
    """Return, for each trained policy with a critic, the policy that owns the critic."""
    return {
        name: policy.critic.share or name
        for name, policy in policies.items()
        if policy.critic is not None and not policy.frozen
    }


def derive_training_chain(
    policies: Mapping[str, Policy], agents: Sequence[Agent], nodes: Sequence[Node], algorithm: Algorithm
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
    names = [agent.policy for agent in agents]

    def node(kind: str, owner: str, role: NodeRole, dependencies: Sequence[str], forward: bool = False) -> Node:
        return Node(
            node_id=f"{owner}.{kind}",
            node_type=NodeType.COMPUTE if role is NodeRole.ADVANTAGE else NodeType.MODEL_TRAIN,
            node_role=role,
            only_forward_compute=forward,
            agent_group=names.index(owner) if owner in names else 0,
            dependencies=tuple(dict.fromkeys(dependencies)),
            policy=owner if owner in trained else None,
        )

    forward: list[Node] = []
    for name, policy in trained.items():
        if algorithm.recomputes_old_log_probs:
            forward.append(node("old_log_probs", name, NodeRole.ACTOR, scored, forward=True))
        if policy.reference:
            forward.append(node("reference", name, NodeRole.REFERENCE, scored, forward=True))
    values = {owner: node("values", owner, NodeRole.CRITIC, scored, forward=True) for owner in owners.values()}
    forward += values.values()
    fixed = [step.node_id for step in forward]

    def inputs(members: Sequence[str]) -> list[str]:
        """Return the nodes on which the advantages of these policies' rows depend."""
        needed = [*scored, *(values[owners[name]].node_id for name in members if name in owners)]
        if algorithm.kl_reward_coef > 0:
            log_probs = [step for step in forward if step.policy in members and step.node_role is not NodeRole.CRITIC]
            needed += [step.node_id for step in log_probs]
        return needed

    if algorithm.spans_policies:
        name = "chain" if algorithm.team_value is None else "mixer"
        joint = node("advantage", name, NodeRole.ADVANTAGE, inputs(list(trained)))
        # A policy may have the name `chain` or `mixer`; the node belongs to no policy all the same.
        advantages = dict.fromkeys(trained, joint.model_copy(update={"policy": None, "agent_group": 0}))
    else:
        advantages = {name: node("advantage", name, NodeRole.ADVANTAGE, inputs([name])) for name in trained}
    updates = [
        node(
            "critic_update",
            owner,
            NodeRole.CRITIC,
            [*fixed, *(advantages[n].node_id for n in owners if owners[n] == owner)],
        )
        for owner in values
    ]
    updates += [node("update", name, NodeRole.ACTOR, [*fixed, advantages[name].node_id]) for name in trained]
    unique = {step.node_id: step for step in advantages.values()}
    return (*forward, *unique.values(), *updates)


def is_derived(node_id: str) -> bool:
    """Return whether a node is part of a derived training chain."""
    return "." in node_id
