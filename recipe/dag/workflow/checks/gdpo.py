"""Checks of rewards by component (`estimator: gdpo`): the components are there, and are what the nodes pay.

Invariant: in a workflow that passes, a component is a reward by itself, and all that pays is a component.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.problem import Problem, did_you_mean
from recipe.dag.workflow.schema import NodeRole

SHAPING = "recipe.dag.reward.credit"
"""Its functions return what they change of the sum of all rewards."""


def check_gdpo(draft: Draft) -> Iterator[Problem]:
    say, algorithm = draft.source.problem, draft.algorithm
    if algorithm.estimator != "gdpo":
        return
    paying = [
        node.node_id
        for _, node in draft.each_node()
        if node.node_role is NodeRole.REWARD or node.agent_options.rewards_with_env
    ]
    for name in algorithm.weights:
        if name not in paying:
            hint = did_you_mean(name, paying) or "; a component is named by the node that pays it"
            yield say(("algorithm", "weights", name), f"no node `{name}` pays a reward{hint}", key=True)
    if algorithm.kl_reward_coef > 0:
        message = "gdpo compares what nodes pay, and the KL is none of them; use `kl_loss_coef`"
        yield say(("algorithm", "kl_reward_coef"), message, key=True)
    for index, node in draft.each_node():
        place = (node.executable_ref or "").partition(":")[0].removesuffix(".py").replace("/", ".")
        if node.node_role is NodeRole.REWARD and place.endswith(SHAPING):
            message = "this node changes the sum of the others' rewards, so it is no component; remove it under gdpo"
            yield say(("nodes", index, "executable_ref"), message)
