"""What each flag of siiRL's MARFT script means here.

Invariant: every flag is in `FLAGS` under siiRL's name. It becomes keys of the run or edits of the workflow, or is
refused by its name with the reason; none is dropped in silence. Pure.
"""

from __future__ import annotations

from recipe.dag.errors import UserError
from recipe.marft.rules import (
    RUN,
    Rule,
    Translation,
    as_it_is,
    choice,
    clip_ratio,
    do_sample,
    epochs,
    micro_batch,
    mini_batch,
    only,
    refused,
    renamed,
    text,
    tokens,
    truth,
    turns,
    workflow,
)

FLAGS: dict[str, Rule] = {
    "algorithm.adv_estimator": choice(
        gae_marft={"algorithm.estimator": "gae_chain"},
        gae={"algorithm.estimator": "gae"},
        grpo={"algorithm.estimator": "grpo"},
        cpgd={"algorithm.estimator": "grpo", "algorithm.policy_loss": "cpgd"},
    ),
    "algorithm.gamma": workflow("algorithm.gamma"),
    "algorithm.lam": workflow("algorithm.lam"),
    "algorithm.share_reward_in_agent": workflow("algorithm.share_reward_in_agent", kind=truth),
    "algorithm.use_kl_in_reward": workflow("use_kl_in_reward", kind=truth),
    "algorithm.kl_ctrl.kl_coef": workflow("kl_coef"),
    "algorithm.kl_ctrl.type": only("fixed", reason="the weight of the KL stays as it is"),
    "dag.workflow_path": renamed("workflow"),
    "dag.custom_pipeline_fn": refused("a graph is a YAML file here; pass it as dag.workflow_path=FILE"),
    "dag.enable_perf": only("false", reason="times are measured in every run (timing/... in metrics.jsonl)"),
    "dag.backend_threshold": refused("verl chooses the communication backends"),
    "dag.env_enable": refused("a node has an env if its agent_options.env_path names one"),
    "dag.environment_path": refused("a node names its env in agent_options.env_path"),
    f"{RUN}.model.path": renamed("model_path"),
    f"{RUN}.model.use_remove_padding": as_it_is,
    f"{RUN}.model.enable_gradient_checkpointing": as_it_is,
    f"{RUN}.rollout.name": only("sglang", reason="SGLang is the only server on GPUs"),
    f"{RUN}.rollout.mode": only("async", reason="the server takes and gives token ids, text is never encoded again"),
    f"{RUN}.rollout.agent.rewards_with_env": workflow("rewards_with_env", kind=truth),
    f"{RUN}.rollout.agent.agent_name": refused("agents are named under `agents` in the workflow"),
    f"{RUN}.rollout.agent.num_workers": refused("episodes are not run by workers; rollout.max_in_flight bounds them"),
    f"{RUN}.rollout.agent.custom_async_server": refused("the server is SGLang"),
    f"{RUN}.rollout.multi_turn.enable": refused("turns are on where max_assistant_turns is above 1"),
    f"{RUN}.rollout.multi_turn.max_assistant_turns": workflow("episode.max_turns"),
    f"{RUN}.rollout.multi_turn.use_all_traj": workflow("episode.train_turns", kind=turns),
    f"{RUN}.rollout.n": as_it_is,
    f"{RUN}.rollout.temperature": workflow("sampling.temperature"),
    f"{RUN}.rollout.top_p": workflow("sampling.top_p"),
    f"{RUN}.rollout.top_k": workflow("sampling.top_k"),
    f"{RUN}.rollout.val_kwargs.n": renamed("validation.n"),
    f"{RUN}.rollout.val_kwargs.temperature": workflow("validation.temperature"),
    f"{RUN}.rollout.val_kwargs.top_p": workflow("validation.top_p"),
    f"{RUN}.rollout.val_kwargs.top_k": workflow("validation.top_k"),
    f"{RUN}.rollout.val_kwargs.do_sample": do_sample,
    f"{RUN}.rollout.prompt_length": renamed("data.max_prompt_length"),
    f"{RUN}.rollout.response_length": tokens,
    f"{RUN}.rollout.max_model_len": as_it_is,
    f"{RUN}.rollout.tensor_model_parallel_size": as_it_is,
    f"{RUN}.rollout.gpu_memory_utilization": as_it_is,
    f"{RUN}.rollout.free_cache_engine": only(
        "true", reason="servers give their memory back while models train, else two policies do not fit"
    ),
    f"{RUN}.rollout.enforce_eager": as_it_is,
    f"{RUN}.rollout.enable_chunked_prefill": as_it_is,
    f"{RUN}.rollout.log_prob_micro_batch_size_per_gpu": refused(
        f"one size serves all passes: {RUN}.actor.ppo_micro_batch_size_per_gpu"
    ),
    f"{RUN}.ref.log_prob_micro_batch_size_per_gpu": refused(
        f"one size serves all passes: {RUN}.actor.ppo_micro_batch_size_per_gpu"
    ),
    "data.train_files": as_it_is,
    "data.val_files": as_it_is,
    "data.train_batch_size": as_it_is,
    "data.max_prompt_length": as_it_is,
    "data.max_response_length": tokens,
    "data.return_raw_chat": only("true", reason="chat messages are all that hooks get"),
    "data.filter_overlong_prompts": only(
        "false", reason="an episode whose prompt leaves no room to answer ends unanswered (prompt_too_long)"
    ),
    "data.truncation": only("error", reason="no prompt is ever cut"),
    "data.shuffle": only("true", reason="the order of the samples follows from `seed`"),
    f"{RUN}.actor.optim.lr": workflow("policy.lr"),
    f"{RUN}.actor.ppo_mini_batch_size": mini_batch,
    f"{RUN}.actor.ppo_micro_batch_size_per_gpu": micro_batch,
    f"{RUN}.actor.use_dynamic_bsz": as_it_is,
    f"{RUN}.actor.ppo_epochs": workflow("algorithm.epochs"),
    f"{RUN}.actor.clip_ratio": clip_ratio,
    f"{RUN}.actor.clip_ratio_low": workflow("algorithm.clip_ratio_low"),
    f"{RUN}.actor.clip_ratio_high": workflow("algorithm.clip_ratio_high"),
    f"{RUN}.actor.clip_ratio_c": workflow("algorithm.clip_ratio_c"),
    f"{RUN}.actor.entropy_coeff": workflow("algorithm.entropy_coef"),
    f"{RUN}.actor.grad_clip": renamed(f"{RUN}.actor.optim.clip_grad"),
    f"{RUN}.actor.use_kl_loss": workflow("use_kl_loss", kind=truth),
    f"{RUN}.actor.kl_loss_coef": workflow("algorithm.kl_loss_coef"),
    f"{RUN}.actor.kl_loss_type": as_it_is,
    "critic.model.path": workflow("critic.model", kind=text),
    "critic.optim.lr": workflow("critic.lr"),
    "critic.cliprange_value": workflow("critic.cliprange_value"),
    "critic.grad_clip": renamed("critic.optim.clip_grad"),
    "critic.ppo_epochs": workflow("critic.epochs"),
    "critic.ppo_mini_batch_size": mini_batch,
    "critic.ppo_micro_batch_size_per_gpu": micro_batch,
    "critic.use_dynamic_bsz": workflow("critic.config.use_dynamic_bsz", kind=truth),
    "trainer.critic_warmup": workflow("algorithm.critic_warmup"),
    "trainer.total_epochs": epochs,
    "trainer.val_before_train": as_it_is,
    "trainer.save_freq": as_it_is,
    "trainer.test_freq": as_it_is,
    "trainer.logger": as_it_is,
    "trainer.n_gpus_per_node": as_it_is,
    "trainer.nnodes": as_it_is,
}
"""By siiRL's full name; `rollout.`, `actor.` and `model.` may stand for `actor_rollout_ref.rollout.` and so on."""
SHORT = ("rollout.", "actor.", "ref.", "model.")


def translate(arguments: list[str]) -> Translation:
    """`key=value` each; a key that is no flag of siiRL's is this engine's and goes on as it is. Raises UserError, with
    a line for each flag that has no meaning here."""
    out, wrong = Translation(), []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"{argument}: write it as key=value")
        flag = _flag(key)
        if flag is None:
            out.overrides[key] = value
            continue
        try:
            FLAGS[flag](flag, value, out)
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("\nerror: ".join(wrong))
    if out.greedy:
        out.edits["validation.temperature"] = 0.0
    return out


def _flag(key: str) -> str | None:
    """siiRL's full name of a flag; None for a key that is none of its flags."""
    names = (key, f"{RUN}.{key}") if key.startswith(SHORT) else (key,)
    return next((name for name in names if name in FLAGS), None)
