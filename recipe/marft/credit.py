"""Edits for flags that change credit: the estimator, the KL, the source of the reward.

Invariant: with another estimator, the keys that it needs are added and those without an effect removed, so that the
workflow is valid again; a key that another flag sets is never removed.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.catalogue import DEFAULT, METHODS, Custom, algorithm_class
from recipe.dag.algorithms.loss import READERS
from recipe.dag.compat.siirl.settings import ENV_OUTCOME, KL_LOSS_COEF, RULE_REWARD
from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import KeyPath
from recipe.dag.loading.workflow_copy import WorkflowCopy
from recipe.dag.workflow.verl_keys import RUN
from recipe.marft.rules import Edit

ESTIMATORS = {
    "gae_marft": {"estimator": "gae_chain"},
    "gae": {"estimator": "gae"},
    "grpo": {"estimator": "grpo"},
    "cpgd": {"estimator": "grpo", "policy_loss": "cpgd"},
}
COMPARING = ("grpo", "cpgd")
"""Estimators that compare the episodes of a sample."""
KL = (
    ("use_kl_in_reward", "kl_reward_coef", 0.001, "algorithm.use_kl_in_reward"),
    ("use_kl_loss", "kl_loss_coef", KL_LOSS_COEF, f"{RUN}.actor.use_kl_loss"),
)
"""(switch, weight, siiRL's default of the weight, the switch's flag)."""

Edits = dict[str, Edit]


def set_estimator(copy: WorkflowCopy, edits: Edits) -> None:
    """Apply `adv_estimator`, with the keys, sharing of rewards and critics that belong to the estimator."""
    edit = edits.pop("adv_estimator", None)
    before = _method(copy)
    if edit is not None:
        for key, value in ESTIMATORS[edit.value].items():
            copy.set(("algorithm", key), value, edit.argument)
        _leave_out_unread(copy, edits, edit)
        _share_reward(copy, edits, edit, before)
        _set_critics(copy, edit)
    warmup = edits.get("algorithm.critic_warmup")
    if not _method(copy).needs_values and warmup is not None and warmup.value == 0:
        del edits["algorithm.critic_warmup"]  # without a critic there is no warm-up


def set_kl(copy: WorkflowCopy, edits: Edits) -> None:
    """Apply the KL flags. siiRL has a switch and a weight; here a weight of 0 means off, and with a weight the policies
    need their reference."""
    cause: Edit | None = None
    for switch, weight, default, flag in KL:
        on, coef = edits.pop(switch, None), edits.pop(weight, None)
        cause = on or coef or cause
        before = copy.get("algorithm", weight) or 0
        if on is not None and not on.value:
            copy.set(("algorithm", weight), 0, on.argument)
        elif coef is not None:
            if on is None and coef.value and not before:
                raise UserError(f"{coef.argument}: it has no effect without {flag}=True; add that, or remove this")
            copy.set(("algorithm", weight), coef.value, (coef if coef.value else on or coef).argument)
        elif on is not None:
            copy.set(("algorithm", weight), before or default, on.argument)
    if cause is None:
        return
    needs_reference = any(copy.get("algorithm", weight) for _, weight, _, _ in KL)
    for policy in copy.trained():
        if needs_reference:
            copy.set((*policy, "reference"), True, cause.argument)
        else:
            copy.drop((*policy, "reference"), cause.argument)


def set_env_rewards(copy: WorkflowCopy, edits: Edits) -> None:
    """Apply `rewards_with_env`: rewards come from the envs, or from siiRL's rule, which grades the answer of the agent
    that steps the env."""
    edit = edits.pop("rewards_with_env", None)
    if edit is None:
        return
    steps = copy.stepping()
    if not steps and edit.value:
        raise UserError(f"{edit.argument}: no node of the workflow has an env (`env`); remove it")
    tasks = [copy.get(*step, "prompt_options", "task") for step in steps]
    if "code" in tasks and not edit.value:
        raise UserError(f"{edit.argument}: only the env can judge a program; remove the flag")
    paying = any(copy.get(*step, "env_pays") for step in steps)
    for step in steps:
        copy.set((*step, "env_pays"), edit.value, edit.argument)
    if paying == edit.value or not steps:
        return
    old, new = (RULE_REWARD, ENV_OUTCOME) if edit.value else (ENV_OUTCOME, RULE_REWARD)
    rewards: list[KeyPath] = [("nodes", i) for i, node in enumerate(copy.data["nodes"]) if node.get("reward")]
    scoring = [path for path in rewards if _names(copy.get(*path, "reward"), old)]
    if not edit.value and not rewards:
        raise UserError(f"{edit.argument}: without the env there is no reward; add a reward node, or remove the flag")
    for path in scoring:
        copy.set((*path, "reward"), new, edit.argument)
        copy.drop((*path, "args"), edit.argument)
        if not edit.value:
            copy.set((*path, "args"), {"agent": copy.get(*steps[-1], "agent")}, edit.argument)


def _method(copy: WorkflowCopy) -> type[Algorithm]:
    """Return the estimator's class; the default one for an unknown name, which the loader reports."""
    return algorithm_class(copy.get("algorithm", "estimator")) or DEFAULT


def _leave_out_unread(copy: WorkflowCopy, edits: Edits, edit: Edit) -> None:
    """Remove keys that have no effect with the estimator, unless a flag sets them."""
    method = _method(copy)
    loss = copy.get("algorithm", "policy_loss") or DEFAULT.model_fields["policy_loss"].default
    unread = {key for other in (*METHODS, Custom) for key in other.model_fields} - method.model_fields.keys()
    unread |= {key for key, reader in READERS.items() if reader != loss}
    if "group_by" not in method.model_fields:
        unread |= {"drop_zero_variance", "dynamic_sampling"}
    for key in sorted(unread):
        if f"algorithm.{key}" not in edits:
            copy.drop(("algorithm", key), edit.argument)


def _share_reward(copy: WorkflowCopy, edits: Edits, edit: Edit, before: type[Algorithm]) -> None:
    """Share the reward, as siiRL does, if the new estimator does not propagate rewards between agents itself."""
    if "algorithm.share_reward_in_agent" in edits:
        return
    if _method(copy).spans_policies:
        copy.drop(("algorithm", "share_reward_in_agent"), edit.argument)
    elif before.spans_policies and len(copy.data["agents"]) > 1:
        copy.set(("algorithm", "share_reward_in_agent"), True, edit.argument)


def _set_critics(copy: WorkflowCopy, edit: Edit) -> None:
    for policy in copy.trained():
        if not _method(copy).needs_values:
            copy.drop((*policy, "critic"), edit.argument)
        elif copy.get(*policy, "critic") is None:
            copy.set((*policy, "critic"), {}, edit.argument)


def _names(ref: Any, function: str) -> bool:
    """Compare the function names only: `recipe/marft/hooks.py:env_outcome` re-exports the engine's `env_outcome`."""
    return isinstance(ref, str) and ref.rpartition(":")[2] == function.rpartition(":")[2]
