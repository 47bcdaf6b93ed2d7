"""Where the dotted keys of siiRL's node `config` go here.

Invariant: a key is moved to the option that does the same, kept as an override of verl's configuration, or named in a
warning; none is lost silently.
"""

from __future__ import annotations

from typing import Any

ACTOR_KEYS = {
    "model.path": "model.path",
    "model.tokenizer_path": "model.tokenizer_path",
    "model.trust_remote_code": "model.trust_remote_code",
    "actor.optim.lr": "lr",
}
"""Of a rollout, actor or reference node -> of its policy. What no table names stays an override of verl's."""

CRITIC_KEYS = {
    "model.path": "model.path",
    "model.tokenizer_path": "model.tokenizer_path",
    "model.trust_remote_code": "model.trust_remote_code",
    "optim.lr": "lr",
    "cliprange_value": "cliprange_value",
    "ppo_epochs": "epochs",
}
"""Of a critic node -> of its policy's critic."""

AGENT_KEYS = {
    "rollout.temperature": "sampling.temperature",
    "rollout.top_p": "sampling.top_p",
    "rollout.top_k": "sampling.top_k",
    "rollout.repetition_penalty": "sampling.repetition_penalty",
    "rollout.response_length": "sampling.max_tokens",
    "rollout.val_kwargs.temperature": "validation.temperature",
    "rollout.val_kwargs.top_p": "validation.top_p",
    "rollout.val_kwargs.top_k": "validation.top_k",
}

EPISODE_KEYS = {"rollout.multi_turn.max_assistant_turns": "max_turns", "rollout.multi_turn.use_all_traj": "train_turns"}

ALGORITHM_KEYS = {
    "actor.kl_loss_coef": "kl_loss_coef",
    "actor.clip_ratio": "clip_ratio",
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

_RUN = "the run's configuration says this, for all policies; nothing reads it here: pass `{}` to the run"
_STEPS = "nothing reads it; optimizer steps are counted by `mini_batches`, not by their size"
UNREAD = {
    "rollout.n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "rollout.name": "the run chooses the server; nothing reads it here",
    "rollout.mode": "the server works on token ids, asynchronously; nothing reads it here",
    "rollout.prompt_length": _RUN.format("data.max_prompt_length=..."),
    "rollout.val_kwargs.n": _RUN.format("validation.n=..."),
    "rollout.val_kwargs.do_sample": "nothing reads it; greedy is `validation: {temperature: 0}` of the agent",
    "rollout.multi_turn.enable": "nothing reads it; `episode.max_turns` says how many turns there are",
    "rollout.agent.num_workers": "nothing reads it; all episodes run at once",
    "rollout.agent.agent_name": "nothing reads it; the workflow is the agent loop",
    "actor.ppo_mini_batch_size": _STEPS,
    "ppo_mini_batch_size": _STEPS,
    "model_params": "nothing reads it; `gpus` under the policy places it",
}


def translated(name: str, key: str, value: Any) -> tuple[str, Any]:
    """The option and its value where siiRL's value means something else here."""
    if key == "actor.use_cpgd_loss":
        return name, "cpgd" if value else "vanilla"
    if key == "rollout.multi_turn.use_all_traj":
        return name, "all" if value else "last"
    return name, value
