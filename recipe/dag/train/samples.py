"""Whether a run has as many episodes of a sample as its credit compares.

Invariant: a function of the run's configuration and the workflow, known before anything is started.
"""

from __future__ import annotations

from omegaconf import DictConfig

from recipe.dag.errors import UserError
from recipe.dag.workflow.groups import pooled
from recipe.dag.workflow.schema import Workflow


def check_samples(run: DictConfig, workflow: Workflow) -> None:
    """Raises UserError where credit compares siblings and there are none."""
    if int(run.actor_rollout_ref.rollout.n) > 1:
        return
    if workflow.algorithm.uncertainty is not None:
        raise UserError(
            f"{run.workflow}: algorithm.uncertainty compares the episodes of a sample; set "
            "actor_rollout_ref.rollout.n to at least 2, or remove it"
        )
    name, why = workflow.algorithm.estimator, ""
    if workflow.algorithm.team_value is not None:
        why = "compares the episodes of a sample, and there is one"
    elif workflow.algorithm.grouping and _alone(workflow):
        why = "compares an agent with itself in the sample's other episodes, and there is no other"
    if why:
        raise UserError(f"algorithm.estimator: {name} {why}; raise actor_rollout_ref.rollout.n")


def _alone(workflow: Workflow) -> bool:
    """Whether, of one episode, each group holds one trajectory at most."""
    group_by = workflow.algorithm.grouping
    if "uid" not in group_by:
        return False
    agent_of = {node.node_id: node.agent_group for node in workflow.rollout_nodes}
    places = (workflow.rollout_nodes, workflow.loops, workflow.agents, workflow.episode)
    groups = pooled(*places, workflow.trained_policies(), group_by)
    return all(len({agent_of[move.node] for move in group}) == 1 for group in groups)
