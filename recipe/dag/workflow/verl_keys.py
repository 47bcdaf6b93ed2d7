"""Keys of verl's configuration that a `config` cannot set, and what says it instead.

Invariant: a setting has one place. What an option of the workflow or the run's configuration decides, what the engine
itself sets, and what nothing reads, stands in these tables; every other key under verl's `actor_rollout_ref` and
`critic` is free.
"""

from __future__ import annotations

_POLICY = "`policies.<name>.{}` says this; set it there"
_CRITIC = "`policies.<name>.critic.{}` says this; set it there"
_AGENT = "nothing reads it here; write `{}` of the agent"
_ALGORITHM = "`algorithm.{}` says this, for all policies; set it there"
_RUN = "the run's configuration says this, for all policies; nothing reads it here: pass `{}` to the run"
_COUNTED = "the engine counts the steps; `trainer.total_training_steps=...` of the run says how many there are"
_STEPS = "nothing reads it; optimizer steps are counted by `{}`, not by their size"
_ROWS = "nothing reads it; write `{}`, which serves every pass"
_CLIP = "nothing reads it; write `{}`"
_LOADER = "nothing reads it; the order of the rows follows from the run's `seed`"
_ALWAYS = "nothing reads it here; {}"
_LORA = "LoRA policies are not supported yet; remove it"

ACTOR: dict[str, str] = {
    "model.path": _POLICY.format("model.path"),
    "model.tokenizer_path": _POLICY.format("model.tokenizer_path"),
    "model.trust_remote_code": _POLICY.format("model.trust_remote_code"),
    "model.lora_rank": _LORA,
    "model.lora_adapter_path": _LORA,
    "actor.optim.lr": _POLICY.format("lr"),
    "actor.optim.total_training_steps": _COUNTED,
    "actor.clip_ratio": _ALGORITHM.format("clip_ratio_low` and `algorithm.clip_ratio_high"),
    "actor.clip_ratio_low": _ALGORITHM.format("clip_ratio_low"),
    "actor.clip_ratio_high": _ALGORITHM.format("clip_ratio_high"),
    "actor.clip_ratio_c": _ALGORITHM.format("clip_ratio_c"),
    "actor.entropy_coeff": _ALGORITHM.format("entropy_coef"),
    "actor.kl_loss_coef": _ALGORITHM.format("kl_loss_coef"),
    "actor.use_kl_loss": _ALGORITHM.format("kl_loss_coef"),
    "actor.loss_agg_mode": _ALGORITHM.format("loss_agg"),
    "actor.policy_loss.ppo_kl_coef": _ALGORITHM.format("policy_drift_coef"),
    "actor.policy_loss": _ALGORITHM.format("policy_loss"),
    "actor.ppo_epochs": _ALGORITHM.format("epochs"),
    "actor.ppo_mini_batch_size": _STEPS.format("algorithm.mini_batches"),
    "actor.ppo_micro_batch_size": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "actor.grad_clip": _CLIP.format("actor.optim.clip_grad"),
    "actor.shuffle": _LOADER,
    "actor.data_loader_seed": _LOADER,
    "actor.fsdp_config.seed": _RUN.format("seed=..."),
    "actor.rollout_n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "ref.rollout_n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "ref.log_prob_micro_batch_size": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "ref.log_prob_micro_batch_size_per_gpu": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "ref.log_prob_use_dynamic_bsz": _ROWS.format("actor.use_dynamic_bsz"),
    "rollout.log_prob_micro_batch_size": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "rollout.log_prob_micro_batch_size_per_gpu": _ROWS.format("actor.ppo_micro_batch_size_per_gpu"),
    "rollout.log_prob_use_dynamic_bsz": _ROWS.format("actor.use_dynamic_bsz"),
    "rollout.n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "rollout.name": _ALWAYS.format("the run chooses the server"),
    "rollout.mode": _ALWAYS.format("the server works on token ids, asynchronously"),
    "rollout.seed": _RUN.format("seed=..."),
    "rollout.custom": _ALWAYS.format("the engine writes its own into it"),
    "rollout.temperature": _AGENT.format("sampling: {temperature: ...}"),
    "rollout.top_p": _AGENT.format("sampling: {top_p: ...}"),
    "rollout.top_k": _AGENT.format("sampling: {top_k: ...}"),
    "rollout.repetition_penalty": _AGENT.format("sampling: {repetition_penalty: ...}"),
    "rollout.ignore_eos": _AGENT.format("sampling: {ignore_eos: ...}"),
    "rollout.response_length": _AGENT.format("sampling: {max_tokens: ...}"),
    "rollout.do_sample": _AGENT.format("sampling: {temperature: ...}"),
    "rollout.prompt_length": _RUN.format("data.max_prompt_length=..."),
    "rollout.val_kwargs.n": _RUN.format("validation.n=..."),
    "rollout.val_kwargs.do_sample": "nothing reads it; greedy is `validation: {temperature: 0}` of the agent",
    "rollout.val_kwargs": _AGENT.format("validation: {...}"),
    "rollout.multi_turn": "nothing reads it; `episode.max_turns` says how many turns there are",
    "rollout.multi_turn.use_all_traj": "nothing reads it; `episode.train_turns` says which turns are trained on",
    "rollout.agent": "nothing reads it; the workflow is the agent loop",
    "rollout.agent.num_workers": "nothing reads it; all episodes run at once",
    "rollout.agent.rewards_with_env": "nothing reads it; `agent_options.rewards_with_env` of the node says it",
    "rollout.calculate_log_probs": _ALWAYS.format("the server always gives them"),
    "model_params": "nothing reads it; `gpus` under the policy places it",
}
"""Under `actor_rollout_ref`: key -> what to say of it, and of all keys under it that have no entry of their own."""

CRITIC: dict[str, str] = {
    "enable": "`policies.<name>.critic` says this; a policy that has one trains it",
    "model.path": _CRITIC.format("model.path"),
    "model.tokenizer_path": "a critic reads the tokens of its policy: `policies.<name>.model.tokenizer_path`",
    "model.trust_remote_code": _CRITIC.format("model.trust_remote_code"),
    "model.lora_rank": _LORA,
    "optim.lr": _CRITIC.format("lr"),
    "optim.total_training_steps": _COUNTED,
    "cliprange_value": _CRITIC.format("cliprange_value"),
    "ppo_epochs": _CRITIC.format("epochs"),
    "ppo_mini_batch_size": _STEPS.format("critic.mini_batches"),
    "ppo_micro_batch_size": _ROWS.format("ppo_micro_batch_size_per_gpu"),
    "forward_micro_batch_size": _ROWS.format("ppo_micro_batch_size_per_gpu"),
    "forward_micro_batch_size_per_gpu": _ROWS.format("ppo_micro_batch_size_per_gpu"),
    "forward_max_token_len_per_gpu": _ROWS.format("ppo_max_token_len_per_gpu"),
    "grad_clip": _CLIP.format("optim.clip_grad"),
    "shuffle": _LOADER,
    "data_loader_seed": _LOADER,
    "fsdp.seed": _RUN.format("seed=..."),
    "rollout_n": _RUN.format("actor_rollout_ref.rollout.n=..."),
    "model_params": "nothing reads it; `gpus` under the policy places it",
}
"""The same under `critic`."""


def why_not(key: str, *, critic: bool, policy: str) -> str | None:
    """What to say of a dotted key in the `config` of `policy` or its critic; None of one that may be set there."""
    table = CRITIC if critic else ACTOR
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (message := table.get(".".join(parts[:length]))) is not None:
            return message.replace("<name>", policy)
    return None


def rows_key(critic: bool) -> tuple[str, str]:
    """(the key that gives micro-batches a number of rows, the one that says whether they are made by tokens instead)"""
    prefix = "" if critic else "actor."
    return f"{prefix}ppo_micro_batch_size_per_gpu", f"{prefix}use_dynamic_bsz"
