"""Roles that change hands among policies (CORY, credit/rotation.py).

Invariant: a function of the workflow and the step, so a resumed run goes on where it was. Agents change policies;
weights, optimizers and critics stay with theirs.
"""

from __future__ import annotations

from recipe.dag.credit.rotation import bindings
from recipe.dag.workflow.schema import Workflow


def as_bound(workflow: Workflow, step: int) -> Workflow:
    """The workflow with its agents' policies of step `step` (from 0)."""
    cory = workflow.algorithm.cory
    if cory is None:
        return workflow
    declared = {agent.name: agent.policy for agent in workflow.agents}
    bound = bindings(cory.roles, [declared[role] for role in cory.roles], every=cory.every, step=step)
    agents = (agent.model_copy(update={"policy": bound.get(agent.name, agent.policy)}) for agent in workflow.agents)
    return workflow.model_copy(update={"agents": tuple(agents)})
