"""Checks of a workflow's pieces against each other.

Invariant: every check runs whatever the others found, and speaks only about pieces that could be read: one mistake, one
problem. Checks that need the whole file (an unused policy) wait until all of it can be read.
"""

from __future__ import annotations

from recipe.dag.workflow.checks.agent import check_agents, check_envs, check_unused_tools
from recipe.dag.workflow.checks.algorithm import check_algorithm
from recipe.dag.workflow.checks.condition import check_condition_order, check_conditions
from recipe.dag.workflow.checks.cory import check_cory
from recipe.dag.workflow.checks.flow import check_dependencies, check_flow
from recipe.dag.workflow.checks.gdpo import check_gdpo
from recipe.dag.workflow.checks.happo import check_happo
from recipe.dag.workflow.checks.loop import check_loop_order, check_loops
from recipe.dag.workflow.checks.loss import check_loss
from recipe.dag.workflow.checks.mixer import check_mixer, check_mixer_peers
from recipe.dag.workflow.checks.names import check_names
from recipe.dag.workflow.checks.node import check_nodes
from recipe.dag.workflow.checks.policy import check_policies
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.checks.reward import check_rewards
from recipe.dag.workflow.checks.reward_option import check_reward_options
from recipe.dag.workflow.checks.training import check_training
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.overrides import check_overrides
from recipe.dag.workflow.problem import Problem


def check_workflow(draft: Draft) -> list[Problem]:
    """Everything that is wrong with a draft beyond what reading its pieces found."""
    references = References(draft.source)
    problems = [*check_names(draft), *check_agents(draft), *check_policies(draft), *check_algorithm(draft)]
    problems += check_mixer(draft)
    problems += [
        *check_unused_tools(draft),
        *check_envs(draft),
        *check_nodes(draft),
        *check_conditions(draft),
        *check_overrides(draft),
    ]
    problems += references.check_estimator(draft.algorithm)
    for index, agent in draft.each_agent():
        problems += references.check_agent(agent, ("agents", index))
    for name, tool in draft.tools.items():
        if tool is not None:
            problems += references.check_tool(tool, ("tools", name), name=name)
    for name, env in draft.envs.items():
        if env is not None:
            problems += references.check_env(env, ("envs", name))
    for index, node in draft.each_node():
        problems += references.check_node(node, ("nodes", index))
    options = list(check_reward_options(draft, references))
    problems += options
    loose = list(check_loops(draft))
    broken = list(check_dependencies(draft))
    problems += [*loose, *broken]
    if draft.whole and not broken:
        disorder = [] if loose else list(check_loop_order(draft))
        if not loose:
            problems += [*disorder, *check_condition_order(draft)]
        if not loose and not disorder:
            problems += check_mixer_peers(draft)
        problems += [*check_flow(draft), *check_training(draft)]
        problems += [] if options else check_rewards(draft, references)
        problems += [*check_loss(draft), *check_happo(draft), *check_cory(draft), *check_gdpo(draft, references)]
    return problems
