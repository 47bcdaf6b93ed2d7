"""Keys of verl's configuration that its users type and that nothing reads here, with what to write instead.

Invariant: a message has no say in what is accepted. `verl_reads` lists the keys that are read; all others are refused,
with or without an entry here. docs/migrating.md shows the table.
"""

from __future__ import annotations

from recipe.dag.core.suggestion import closest
from recipe.dag.workflow.verl_reads import ACTOR, CRITIC, is_listed, keys_of

RUN = "actor_rollout_ref"
PAGE = "docs/migrating.md lists what replaces verl's keys"
_ALGORITHM = "`algorithm.{}` says this, for all policies; set it in the workflow"
_WORKFLOW = "`algorithm.{}` says this; set it in the workflow"
_POLICY = "`policies.<name>.{}` says this; set it there"
_PAIRS = "`algorithm: {{estimator: spin, {}}}` says this; set it in the workflow"
_AGENT = "nothing reads it here; write `{}` of the agent"
_WRITE = "nothing reads it; write `{}`"
_PASS = "nothing reads it; pass `{}=...` to the run"
_ROWS = "nothing reads it; write `{}ppo_micro_batch_size_per_gpu`, which serves every pass"
_STEPS = "nothing reads it; optimizer steps are counted by `{}`, not by their size"
_SERVER = "SGLang does it unless `@rollout.engine_kwargs.sglang.{}` is {}; set that instead"
_TURNS = "nothing reads it; `episode.max_turns` says how many turns there are"
_REWARD = "nothing reads it; a REWARD node of the workflow, or an env, pays the reward"
_EPISODES = "nothing reads it; episodes are in the episodes.jsonl of the output folder (`report.episodes_per_step=...`)"
_CRITICS = "a critic takes its actor's; pass `{}=...`, or set it for one critic in `policies.<name>.critic.config`"

TABLE: tuple[tuple[str, str], ...] = (
    ("@model.path", "`policies.<name>.model.path` says this; set it there, or pass `model_path=...`, which is what "
     "${oc.env:MODEL_PATH} means in the workflow"),
    ("@model.tokenizer_path critic.model.tokenizer_path", _POLICY.format("model.tokenizer_path")),
    ("@model.trust_remote_code data.trust_remote_code", _POLICY.format("model.trust_remote_code")),
    ("@model.lora @model.lora_rank @model.lora_alpha critic.model.lora critic.model.lora_rank critic.model.lora_alpha",
     "`policies.<name>.lora` says this; set it there"),
    ("@actor.optim.lr", _POLICY.format("lr")),
    ("@actor.clip_ratio", _ALGORITHM.format("clip_ratio_low` and `algorithm.clip_ratio_high")),
    ("@actor.clip_ratio_low @actor.clip_ratio_high @actor.clip_ratio_c", _ALGORITHM.format("<key>")),
    ("@actor.entropy_coeff", _ALGORITHM.format("entropy_coef")),
    ("@actor.use_kl_loss @actor.kl_loss_coef", _ALGORITHM.format("kl_loss_coef")),
    ("@actor.loss_agg_mode", _ALGORITHM.format("loss_agg")),
    ("@actor.policy_loss", _ALGORITHM.format("policy_loss")),
    ("@actor.ppo_epochs", _ALGORITHM.format("epochs")),
    ("@actor.ppo_mini_batch_size", _STEPS.format("algorithm.mini_batches")),
    ("@actor.grad_clip", _WRITE.format("@actor.optim.clip_grad")),
    ("@actor.ppo_micro_batch_size @ref.log_prob_micro_batch_size @ref.log_prob_micro_batch_size_per_gpu "
     "@rollout.log_prob_micro_batch_size @rollout.log_prob_micro_batch_size_per_gpu", _ROWS.format("@actor.")),
    ("@ref.log_prob_use_dynamic_bsz @rollout.log_prob_use_dynamic_bsz", _WRITE.format("@actor.use_dynamic_bsz")),
    ("critic.model.path critic.model.trust_remote_code", _POLICY.format("critic.model.<key>")),
    ("critic.optim.lr", _POLICY.format("critic.lr")),
    ("critic.cliprange_value", _POLICY.format("critic.<key>")),
    ("critic.ppo_epochs", _POLICY.format("critic.epochs")),
    ("critic.ppo_mini_batch_size", _STEPS.format("policies.<name>.critic.mini_batches")),
    ("critic.grad_clip", _WRITE.format("critic.optim.clip_grad")),
    ("critic.ppo_micro_batch_size critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu",
     _ROWS.format("critic.")),
    ("critic.forward_max_token_len_per_gpu", _WRITE.format("critic.ppo_max_token_len_per_gpu")),
    ("critic.strategy critic.use_dynamic_bsz", _CRITICS.format("actor_rollout_ref.actor.<key>")),
    ("critic.model.external_lib critic.model.override_config critic.model.enable_gradient_checkpointing "
     "critic.model.use_remove_padding critic.model.use_liger", _CRITICS.format("actor_rollout_ref.model.<key>")),
    ("@model_params", "nothing reads it; `gpus` under the policy places it"),
    ("@rollout.n", "nothing reads it here; pass `actor_rollout_ref.rollout.n=...` to the run, for all policies"),
    ("@rollout.name", "nothing reads it here; the run chooses the server"),
    ("@rollout.mode", "nothing reads it here; the server works on token ids, asynchronously"),
    ("@rollout.enable_chunked_prefill", _SERVER.format("chunked_prefill_size", "-1")),
    ("@rollout.enable_prefix_caching", _SERVER.format("disable_radix_cache", "true")),
    ("@rollout.temperature @rollout.top_p @rollout.top_k @rollout.repetition_penalty @rollout.ignore_eos",
     _AGENT.format("sampling: {<key>: ...}")),
    ("@rollout.response_length", _AGENT.format("sampling: {max_tokens: ...}")),
    ("@rollout.prompt_length", _PASS.format("data.max_prompt_length")),
    ("@rollout.val_kwargs.n", _PASS.format("validation.n")),
    ("@rollout.val_kwargs", _AGENT.format("validation: {...}")),
    ("@rollout.multi_turn", _TURNS),
    ("@rollout.multi_turn.max_assistant_turns @rollout.multi_turn.max_user_turns",
     f"{_TURNS}, and `tool_loop: {{max_generations: ...}}` of the agent how often it generates in one"),
    ("@rollout.multi_turn.max_parallel_calls", _AGENT.format("tool_loop: {max_parallel: ...}")),
    ("@rollout.multi_turn.max_tool_response_length", _AGENT.format("tool_loop: {max_response_chars: ...}")),
    ("@rollout.multi_turn.tool_response_truncate_side", _AGENT.format("tool_loop: {truncate: ...}")),
    ("@rollout.multi_turn.format", _AGENT.format("tool_loop: {format: ...}")),
    ("@rollout.multi_turn.tool_config_path @rollout.multi_turn.function_tool_path data.tool_config_path",
     _AGENT.format("tools: [...]")),
    ("@rollout.multi_turn.tokenization_sanity_check_mode", "nothing reads it here; sampled tokens are never rendered "
     "again; a row whose ids, mask and log-probs differ in length ends the run"),
    ("@rollout.agent", "nothing reads it; the workflow is the agent loop"),
    ("algorithm", "nothing reads it; the workflow's `algorithm` says how agents learn"),
    ("algorithm.adv_estimator", _WORKFLOW.format("estimator")),
    ("@actor.dpo_beta algorithm.dpo_beta", _PAIRS.format("beta: ...")),
    ("algorithm.dpo_loss_type", _PAIRS.format("loss: ...")),
    ("algorithm.dpo_label_smoothing", _PAIRS.format("label_smoothing: ...")),
    ("trainer.ref_update_freq", _POLICY.format("reference: {refresh: ...}")),
    ("trainer.critic_warmup", _WORKFLOW.format("<key>")),
    ("algorithm.norm_adv_by_std_in_grpo", _WORKFLOW.format("scale` (std or none) or `algorithm.estimator")),
    ("algorithm.use_kl_in_reward algorithm.kl_ctrl", _WORKFLOW.format("kl_reward_coef")),
    ("algorithm.filter_groups", _WORKFLOW.format("drop_zero_variance` and `algorithm.dynamic_sampling")),
    ("algorithm.rollout_correction", _WORKFLOW.format("importance` or `algorithm.old_log_probs")),
    ("reward reward_model custom_reward_function data.reward_fn_key", _REWARD),
    ("reward.sandbox_fusion.url reward.sandbox_fusion.max_concurrent sandbox_fusion.url sandbox_fusion.max_concurrent",
     _PASS.format("sandbox.<key>")),
    ("reward.sandbox_fusion.memory_limit_mb sandbox_fusion.memory_limit_mb", _PASS.format("sandbox.memory_mb")),
    ("trainer.total_epochs", "there are no epochs; pass `trainer.total_training_steps=...` "
     "(epochs x samples / data.train_batch_size)"),
    ("trainer.val_only", "nothing reads it here; `verl-dag eval WORKFLOW --data FILE` evaluates without training"),
    ("trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir", _EPISODES),
    ("trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
     "nothing reads it; pass `report.keep_checkpoints=...`, which keeps actors and critics"),
    ("trainer.default_hdfs_dir", "nothing reads it; checkpoints are in `trainer.default_local_dir`"),
    ("trainer.device", "nothing reads it; pass `platform=cuda` or `platform=cpu`"),
    ("data.seed data.shuffle", "nothing reads it; the order of the samples follows from `seed=...`"),
    ("data.prompt_key", _PASS.format("data.input_key")),
    ("data.gen_batch_size", _PASS.format("data.train_batch_size")),
    ("data.val_batch_size",
     "nothing reads it here; all validation problems run at once (`rollout.max_in_flight=...`)"),
    ("data.filter_overlong_prompts data.truncation",
     "nothing reads it here; no prompt is cut, and an episode whose prompt leaves no room to answer ends unanswered"),
    ("hydra", "hydra writes nothing here; `output_dir=...` says where a run's files go"),
)  # fmt: skip
"""(keys or blocks, message), where `@` is `actor_rollout_ref.`, `<key>` the key's last part, `<name>` a policy."""

REPLACED = {
    key.replace("@", f"{RUN}."): message.replace("<key>", key.rpartition(".")[2])
    for keys, message in TABLE
    for key in keys.split()
}
"""Key or block -> the message for it and for all keys below it."""


def replacement(key: str) -> str | None:
    """Return the message for a key of the run's configuration, or for the nearest block that contains it; or None."""
    message = _message_of(key)
    return None if message is None else message.replace("@", f"{RUN}.")


def why_not(key: str, *, critic: bool, policy: str) -> str | None:
    """Return the error message for a dotted key in the `config` of `policy` or its critic; None if it may be set."""
    names = [*keys_of(CRITIC if critic else ACTOR)]
    if is_listed(key, names) or any(name.startswith(f"{key}.") for name in names):
        return None
    if (message := _message_of(f"{'critic' if critic else RUN}.{key}")) is not None:
        return message.replace("@", "").replace("`critic.", "`").replace("<name>", policy)
    suggestion = nearest(key, [name.removesuffix(".*") for name in names])
    advice = f"did you mean `{suggestion}`?" if suggestion else f"remove it ({PAGE})"
    return f"nothing reads it here; {advice}"


def _message_of(key: str) -> str | None:
    while key and key not in REPLACED:
        key = key.rpartition(".")[0]
    return REPLACED.get(key)


def nearest(key: str, names: list[str], *, cutoff: float = 0.75) -> str | None:
    """Return the name that a dotted key probably means, or None: one that it shortens or misspells, or has in another
    block. `cutoff`: the least similarity of a misspelt name in its block; the default is for keys that verl may have,
    which are no misspellings."""
    if longer := [name for name in names if name.endswith(f".{key}")]:
        return longer[0]
    block, _, last = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == block}
    if sibling := closest(last, siblings, cutoff=cutoff):
        return siblings[sibling]
    moved = closest(key, (name for name in names if name.rpartition(".")[2] == last))
    return moved or (None if siblings else closest(key, names, cutoff=0.85))


def rows_key(critic: bool) -> tuple[str, str]:
    """Return (the key for the rows per micro-batch, the key that forms micro-batches by tokens instead)."""
    prefix = "" if critic else "actor."
    return f"{prefix}ppo_micro_batch_size_per_gpu", f"{prefix}use_dynamic_bsz"
