"""The options to which the dotted keys of siiRL's node `config` are translated.

Invariant: a key is translated to the option with the same effect. Of the other keys, those that verl's workers read
stay overrides of verl's configuration, and the rest are named in a warning. No key is ignored silently.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.workflow.verl_keys import why_not

ACTOR_KEYS = {
    "model.path": "model.path",
    "model.tokenizer_path": "model.tokenizer_path",
    "model.trust_remote_code": "model.trust_remote_code",
    "actor.optim.lr": "lr",
    "actor.grad_clip": "config.actor.optim.clip_grad",
}
"""Key of a rollout, actor or reference node -> option of its policy."""

CRITIC_KEYS = {
    "model.path": "model.path",
    "model.trust_remote_code": "model.trust_remote_code",
    "optim.lr": "lr",
    "grad_clip": "config.optim.clip_grad",
    "cliprange_value": "cliprange_value",
    "ppo_epochs": "epochs",
}
"""Key of a critic node -> option of its policy's critic."""

AGENT_KEYS = {
    "rollout.temperature": "sampling.temperature",
    "rollout.top_p": "sampling.top_p",
    "rollout.top_k": "sampling.top_k",
    "rollout.repetition_penalty": "sampling.repetition_penalty",
    "rollout.response_length": "sampling.max_tokens",
    "rollout.ignore_eos": "sampling.ignore_eos",
    "rollout.val_kwargs.temperature": "validation.temperature",
    "rollout.val_kwargs.top_p": "validation.top_p",
    "rollout.val_kwargs.top_k": "validation.top_k",
}

EPISODE_KEYS = {"rollout.multi_turn.max_assistant_turns": "max_turns", "rollout.multi_turn.use_all_traj": "train_turns"}

ALGORITHM_KEYS = {
    "actor.kl_loss_coef": "kl_loss_coef",
    "actor.clip_ratio": "clip_ratio_low",  # and clip_ratio_high
    "actor.clip_ratio_low": "clip_ratio_low",
    "actor.clip_ratio_high": "clip_ratio_high",
    "actor.clip_ratio_c": "clip_ratio_c",
    "actor.entropy_coeff": "entropy_coef",
    "actor.ppo_epochs": "epochs",
    "actor.loss_agg_mode": "loss_agg",
    "actor.policy_loss.loss_mode": "policy_loss",
    "actor.use_cpgd_loss": "policy_loss",
    "actor.policy_drift_coeff": "policy_drift_coef",
}

CLIP_RATIO = "actor.clip_ratio"
USE_KL_LOSS = "actor.use_kl_loss"
REWARDS_WITH_ENV = "rollout.agent.rewards_with_env"
TRUTHS = (USE_KL_LOSS, REWARDS_WITH_ENV, "actor.use_cpgd_loss", "rollout.multi_turn.use_all_traj")
"""Keys whose value must be true or false."""
_BRANCHES = ("actor_rollout_ref", "critic", "reward_model", "algorithm", "data", "trainer", "dag")
_OF_THE_ACTOR = ("actor", "rollout", "ref")


def why_ignored(key: str, *, role: str, policy: str) -> str | None:
    """Return the warning for a key that has no effect in a node of this role, in siiRL or here; None if it has one."""
    critic = role == "CRITIC"
    branch = key.partition(".")[0]
    if branch in _BRANCHES or critic and branch in _OF_THE_ACTOR:
        return f"this has no effect in {role} nodes, here as in siiRL"
    return why_not(key, critic=critic, policy=policy)


def translated(name: str, key: str, value: Any) -> tuple[str, Any]:
    """Return the option and its value, converted if siiRL's value has another meaning here."""
    if key == "actor.use_cpgd_loss":
        return name, "cpgd" if value else "vanilla"
    if key == "rollout.multi_turn.use_all_traj":
        return name, "all" if value else "last"
    if key == "rollout.multi_turn.max_assistant_turns" and value is None:
        return name, 1  # siiRL's default is null, which its loop reads as 1
    return name, value
