"""Checks of a workflow's pieces against each other.

Invariant: every check runs whatever the others found, and speaks only about pieces that could be read: one mistake, one
problem. Checks that need the whole file (an unused policy) wait until all of it can be read.
"""

from __future__ import annotations

from recipe.dag.workflow.agent_checks import check_agents, check_envs
from recipe.dag.workflow.algorithm_checks import check_algorithm
from recipe.dag.workflow.condition_checks import check_condition_order, check_conditions
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.flow_checks import check_dependencies, check_flow
from recipe.dag.workflow.happo_checks import check_happo
from recipe.dag.workflow.loop_checks import check_loop_order, check_loops
from recipe.dag.workflow.names import check_names
from recipe.dag.workflow.node_checks import check_nodes
from recipe.dag.workflow.overrides import check_overrides
from recipe.dag.workflow.policy_checks import check_policies
from recipe.dag.workflow.problem import Problem
from recipe.dag.workflow.references import References
from recipe.dag.workflow.training_checks import check_training


def check_workflow(draft: Draft) -> list[Problem]:
    """Everything that is wrong with a draft beyond what reading its pieces found."""
    references = References(draft.source)
    problems = [*check_names(draft), *check_agents(draft), *check_policies(draft), *check_algorithm(draft)]
    problems += [*check_envs(draft), *check_nodes(draft), *check_conditions(draft), *check_overrides(draft)]
    for index, agent in draft.each_agent():
        problems += references.check_agent(agent, ("agents", index))
    for name, env in draft.envs.items():
        if env is not None:
            problems += references.check_env(env, ("envs", name))
    for index, node in draft.each_node():
        problems += references.check_node(node, ("nodes", index))
    loose = list(check_loops(draft))
    broken = list(check_dependencies(draft))
    problems += [*loose, *broken]
    if draft.whole and not broken:
        if not loose:
            problems += [*check_loop_order(draft), *check_condition_order(draft)]
        problems += [*check_flow(draft), *check_training(draft)]
        problems += check_happo(draft)
    return problems
