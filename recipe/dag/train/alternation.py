"""Alternation from step to step: the actors that learn, and the policies of the roles (CORY, arXiv 2410.06101).

Invariant: pure functions of the workflow and the step (counted from 0), so a resumed run alternates exactly like one
that was never stopped. A policy that does not learn in a step keeps its weights, optimizer and learning-rate schedule;
a policy that changes roles keeps them and its critic.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipe.dag.workflow.schema import Workflow


def actor_updates_at(workflow: Workflow, policy: str, step: int) -> bool:
    """Return whether the policy's actor learns in `step`: not during `critic_warmup`, and only when it is the policy's
    turn if `train_cycle` is set."""
    spec = workflow.policies[policy]
    if spec.frozen or step < workflow.algorithm.warmup_steps:
        return False
    if spec.train_cycle is None:
        return True
    alternating = [name for name in workflow.trained_policies() if workflow.policies[name].train_cycle is not None]
    return (step // spec.train_cycle) % len(alternating) == alternating.index(policy)


def actor_updates(workflow: Workflow, policy: str, steps: int) -> int:
    """Return the number of the run's `steps` in which the actor learns: the length of its learning-rate schedule."""
    return sum(actor_updates_at(workflow, policy, step) for step in range(steps))


def as_bound(workflow: Workflow, step: int) -> Workflow:
    """Return the workflow with the policies that its agents have in `step`; the workflow itself without `cory`."""
    cory = workflow.algorithm.cory
    if cory is None:
        return workflow
    declared = {agent.name: agent.policy for agent in workflow.agents}
    bound = bindings(cory.roles, [declared[role] for role in cory.roles], every=cory.every, step=step)
    agents = (agent.model_copy(update={"policy": bound.get(agent.name, agent.policy)}) for agent in workflow.agents)
    return workflow.model_copy(update={"agents": tuple(agents)})


def all_bindings(workflow: Workflow) -> list[Workflow]:
    """Return the workflow as bound in each of the intervals after which the bindings repeat."""
    cory = workflow.algorithm.cory
    return [workflow] if cory is None else [as_bound(workflow, n * cory.every) for n in range(len(cory.roles))]


def bindings(roles: Sequence[str], policies: Sequence[str], *, every: int, step: int) -> dict[str, str]:
    """Return the policy of each role in `step`: as listed in the first `every` steps, then rotated by one every `every`
    steps; with pioneer and observer that is an exchange. There are as many policies as roles, all different.

    After `every * len(roles)` steps each policy has played each role equally long."""
    rotation = (step // every) % len(roles)
    return {role: policies[(index + rotation) % len(roles)] for index, role in enumerate(roles)}
