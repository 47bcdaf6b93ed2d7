"""Checks of rewards by component (`estimator: gdpo`): the components are there, and are what the nodes pay.

Invariant: in a workflow that passes, a component is a reward by itself, and all that pays is a component.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.algorithms.gdpo import Gdpo
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.checks.reward import engine_function
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.problem import Problem, did_you_mean
from recipe.dag.workflow.schema import NodeRole

SHAPING = "reward.credit:"
"""The module whose functions return what they change of the sum of all rewards."""


def check_gdpo(draft: Draft, references: References) -> Iterator[Problem]:
    """Needs a whole draft."""
    if isinstance(draft.algorithm, Gdpo):
        yield from list(_check_components(draft, references)) or _check_several(draft)


def _paying(draft: Draft) -> list[str]:
    return [
        node.node_id
        for _, node in draft.each_node()
        if node.node_role is NodeRole.REWARD or node.agent_options.rewards_with_env
    ]


def _check_several(draft: Draft) -> Iterator[Problem]:
    """Whether there is more than one reward to compare by itself."""
    paying, weights = _paying(draft), draft.algorithm.weights
    if len(paying) == 1:
        message = f"gdpo compares rewards by the node that pays them, and `{paying[0]}` alone pays; choose `grpo`"
        yield draft.source.problem(("algorithm", "estimator"), message)
    elif paying and not any(weights.get(name, 1.0) for name in paying):
        yield draft.source.problem(("algorithm", "weights"), "all weights are 0, so nothing is learned", key=True)


def _check_components(draft: Draft, references: References) -> Iterator[Problem]:
    say, algorithm, paying = draft.source.problem, draft.algorithm, _paying(draft)
    for name in algorithm.weights:
        if name not in paying:
            hint = did_you_mean(name, paying) or "; a component is named by the node that pays it"
            yield say(("algorithm", "weights", name), f"no node `{name}` pays a reward{hint}", key=True)
    if algorithm.kl_reward_coef > 0:
        message = "gdpo compares what nodes pay, and the KL is none of them; use `kl_loss_coef`"
        yield say(("algorithm", "kl_reward_coef"), message, key=True)
    if algorithm.overlong is not None and algorithm.overlong.penalty is not None:
        message = (
            "gdpo divides each reward by its own deviation, so a penalty's size is lost; use `mask: true`, or grpo"
        )
        yield say(("algorithm", "overlong", "penalty"), message, key=True)
    for index, node in draft.each_node():
        if (engine_function(references, node, index) or "").startswith(SHAPING):
            message = "this node changes the sum of the others' rewards, so it is no component; remove it under gdpo"
            yield say(("nodes", index, "executable_ref"), message)
