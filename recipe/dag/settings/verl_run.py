"""Keys of verl's configuration in a run: those that are read, and those that are refused with a replacement.

Invariant: a key that is typed or written into a configuration file has an effect, or is refused by name. A key that
these tables and `recipe.dag.workflow.verl_keys` do not refuse is read by verl's workers (`verl_reads`) or by this
project (`config/dag.yaml`); a test checks that every key of verl's composed configuration is in exactly one of them.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.settings.verl_reads import ACTOR, CRITIC, keys_of
from recipe.dag.workflow.verl_keys import reason_of

RUN = "actor_rollout_ref"
_ALGORITHM = "`algorithm.{}` says this; set it in the workflow"
_PASS = "nothing reads it; pass `{}`"
_NOTHING = "nothing reads it here; {}"
_REWARD = "nothing reads it; a REWARD node of the workflow, or an env, pays the reward"
_SANDBOX = "nothing reads it; pass `sandbox.{}=...`"
_LIKE_ACTOR = (
    f"a critic takes its actor's; pass `{RUN}.{{}}=...`, or set it for one critic in `policies.<name>.critic.config`"
)
_HOOKS = "nothing reads it; hooks write the messages (`agent_options.process_path` of a node)"
_TEXT = "nothing reads it; policies read and write text only"
_EPISODES = "nothing reads it; episodes are in the episodes.jsonl of the output folder (`report.episodes_per_step=...`)"
_KEPT = "nothing reads it; pass `report.keep_checkpoints=...`, which keeps actors and critics"
_LOCAL = "nothing reads it; checkpoints are in `trainer.default_local_dir`"
_SEED = "nothing reads it; the order of the samples follows from `seed=...`"
_ONE_TRAINER = "nothing reads it; a step rolls out, then trains"
_SERVERS = "nothing reads it; rows go straight from the servers to the trainer"

READ = (
    f"{RUN}.actor.optim.lr",
    f"{RUN}.rollout.n",
    "critic.optim.lr",
    "trainer.resume_from_path",
    "ray_kwargs.ray_init.*",
)
"""Keys that a run reads but the `config` of a policy refuses, or that this project reads without config/dag.yaml
setting them."""

REFUSED: dict[str, str] = {
    f"{RUN}.model.path": "pass `model_path=...`, which is what ${oc.env:MODEL_PATH} means in the workflow",
    f"{RUN}.hybrid_engine": _NOTHING.format("servers and trainer share a policy's GPUs"),
    "critic.strategy": _LIKE_ACTOR.format("actor.strategy"),
    "critic.use_dynamic_bsz": _LIKE_ACTOR.format("actor.use_dynamic_bsz"),
    **{
        f"critic.model.{key}": _LIKE_ACTOR.format(f"model.{key}")
        for key in (
            "external_lib",
            "override_config",
            "enable_gradient_checkpointing",
            "use_remove_padding",
            "use_liger",
        )
    },
    "algorithm": "nothing reads it; the workflow's `algorithm` says how agents learn",
    "algorithm.adv_estimator": _ALGORITHM.format("estimator"),
    "algorithm.gamma": _ALGORITHM.format("gamma"),
    "algorithm.lam": _ALGORITHM.format("lam"),
    "algorithm.norm_adv_by_std_in_grpo": _ALGORITHM.format("scale` (std or none) or `algorithm.estimator"),
    "algorithm.use_kl_in_reward": _ALGORITHM.format("kl_reward_coef` (0: no KL) or `algorithm.kl_loss_coef"),
    "algorithm.kl_penalty": "nothing reads it; the KL in the reward is the difference of the log-probs",
    "algorithm.kl_ctrl": _ALGORITHM.format("kl_reward_coef"),
    "algorithm.filter_groups": _ALGORITHM.format("drop_zero_variance` and `algorithm.dynamic_sampling"),
    "algorithm.rollout_correction": _ALGORITHM.format("importance` or `algorithm.old_log_probs"),
    "trainer.balance_batch": _NOTHING.format("rows are always laid out so that ranks have equal work"),
    "trainer.total_epochs": "there are no epochs; pass `trainer.total_training_steps=...` "
    "(epochs x samples / data.train_batch_size)",
    "trainer.critic_warmup": _ALGORITHM.format("critic_warmup"),
    "trainer.val_only": _NOTHING.format("`verl-dag eval WORKFLOW --data FILE` evaluates without training"),
    "trainer.log_val_generations": _EPISODES,
    "trainer.rollout_data_dir": _EPISODES,
    "trainer.validation_data_dir": _EPISODES,
    "trainer.max_actor_ckpt_to_keep": _KEPT,
    "trainer.max_critic_ckpt_to_keep": _KEPT,
    "trainer.del_local_ckpt_after_load": _LOCAL,
    "trainer.default_hdfs_dir": _LOCAL,
    "trainer.esi_redundant_time": _PASS.format("trainer.save_freq=..."),
    "trainer.checkpoint_callback_class": _LOCAL,
    "trainer.ray_wait_register_center_timeout": _NOTHING.format("remove it"),
    "trainer.device": _PASS.format("platform=cuda` or `platform=cpu"),
    "trainer.use_v1": _ONE_TRAINER,
    "trainer.v1": _ONE_TRAINER,
    "data.seed": _SEED,
    "data.shuffle": _SEED,
    "data.validation_shuffle": _NOTHING.format("every problem is validated, in the file's order"),
    "data.gen_batch_size": _PASS.format("data.train_batch_size=..."),
    "data.val_batch_size": _NOTHING.format("all validation problems run at once (`rollout.max_in_flight=...`)"),
    "data.dataloader_num_workers": _NOTHING.format("the files are read once, at the start"),
    "data.filter_overlong_prompts": _NOTHING.format("an episode whose prompt leaves no room to answer ends unanswered"),
    "data.filter_overlong_prompts_workers": _NOTHING.format("no prompts are filtered"),
    "data.truncation": _NOTHING.format("no prompt is ever cut"),
    "data.tokenizer": "nothing reads it; `policies.<name>.model.tokenizer_path` says this; set it in the workflow",
    "data.trust_remote_code": "`policies.<name>.model.trust_remote_code` says this; set it in the workflow",
    "data.use_shm": _NOTHING.format("the files are read once, at the start"),
    "data.prompt_key": _PASS.format("data.input_key=..."),
    "data.reward_fn_key": _REWARD,
    "data.tool_config_path": _NOTHING.format("write `tools` of the agents into the workflow"),
    "data.function_tool_path": _NOTHING.format("write `tools` of the agents into the workflow"),
    "data.return_raw_input_ids": _HOOKS,
    "data.return_raw_chat": _HOOKS,
    "data.return_full_prompt": _HOOKS,
    "data.apply_chat_template_kwargs": _NOTHING.format("write `chat_template_kwargs` of the agents into the workflow"),
    "data.custom_cls": _NOTHING.format("pass the problems as a file (`data.train_files=...`)"),
    "data.image_patch_size": _TEXT,
    "data.image_key": _TEXT,
    "data.video_key": _TEXT,
    "data.audio_key": _TEXT,
    "data.return_multi_modal_inputs": _TEXT,
    "data.mm_processor_kwargs": _TEXT,
    "reward": _REWARD,
    "reward_model": _REWARD,
    "custom_reward_function": _REWARD,
    "reward.sandbox_fusion": _SANDBOX.format("url"),
    "reward.sandbox_fusion.max_concurrent": _SANDBOX.format("max_concurrent"),
    "reward.sandbox_fusion.memory_limit_mb": _SANDBOX.format("memory_mb"),
    "sandbox_fusion": _SANDBOX.format("url"),
    "sandbox_fusion.max_concurrent": _SANDBOX.format("max_concurrent"),
    "sandbox_fusion.memory_limit_mb": _SANDBOX.format("memory_mb"),
    "model_engine": _NOTHING.format("policies train with FSDP 2"),
    "distillation": _NOTHING.format("no loss distils a teacher"),
    "transfer_queue": _SERVERS,
    "skip": _SERVERS,
    "global_profiler": _NOTHING.format("nothing starts verl's profiler; remove it"),
    "ray_kwargs.timeline_json_file": _NOTHING.format("remove it"),
    "async_training": _ONE_TRAINER,
    "hydra": "hydra writes nothing here; `output_dir=...` says where a run's files go",
}
"""Key or block -> the message for it and for all keys below it."""

SAME: dict[str, Any] = {
    f"{RUN}.hybrid_engine": True,
    f"{RUN}.rollout.name": "sglang",
    f"{RUN}.rollout.mode": "async",
    f"{RUN}.rollout.calculate_log_probs": True,
    f"{RUN}.rollout.enable_chunked_prefill": True,
    f"{RUN}.rollout.enable_prefix_caching": True,
    f"{RUN}.rollout.pipeline_model_parallel_size": 1,
    f"{RUN}.ref.fsdp_config.param_offload": True,
    f"{RUN}.model.lora_rank": 0,
    "critic.model.lora_rank": 0,
    "data.shuffle": True,
    "data.validation_shuffle": False,
    "data.return_raw_chat": True,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "trainer.balance_batch": True,
    "trainer.val_only": False,
    "reward_model.enable": False,
    "reward.reward_model.enable": False,
    "distillation.enabled": False,
    "global_profiler.tool": None,
    "transfer_queue.enable": False,
    "model_engine": "dp",
}
"""Refused keys -> the value that describes what happens anyway, which is accepted."""


NO_EFFECT = {"default_agent.micro_rollout_batch_size": "the server batches what is in flight"}
"""Keys of predecessors, accepted so that their command lines work -> the reason why the key is not needed."""


def refusal(key: str, policy: str = "<name>") -> str | None:
    """Return why one of verl's keys has no effect on a run, and which key has it; None for a key that is read, or that
    is not verl's."""
    if key in READ:
        return None
    branch, _, rest = key.partition(".")
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (message := REFUSED.get(".".join(parts[:length]))) is not None:
            return message
    if branch not in (RUN, "critic"):
        return "verl names its own classes; remove it" if parts[-1] == "_target_" else None
    message = reason_of(rest, critic=branch == "critic")
    return None if message is None else _for_a_run(message, branch).replace("<name>", policy)


def says_the_same(key: str, value: Any) -> bool:
    """Return whether a refused key has the value that describes what happens anyway."""
    return key in SAME and type(value) is type(SAME[key]) and value == SAME[key]


def _for_a_run(message: str, branch: str) -> str:
    """Rewrite a message of `verl_keys`, which is about a policy's `config`, for a key that is passed to a run."""
    prefix = "the run's configuration says this, for all policies; nothing reads it here: pass "
    if message.startswith(prefix):
        return f"nothing reads it; pass {message.removeprefix(prefix).removesuffix(' to the run')}"
    return message.replace("set it there", "set it in the workflow").replace("@", f"{branch}.")


def is_read(key: str) -> bool:
    """Return whether verl reads this key of its configuration, or this project reads it without config/dag.yaml setting
    it."""
    # an entry `block.*` matches the block itself and every key below it
    return any(
        key == entry or entry.endswith(".*") and f"{key}.".startswith(entry.removesuffix("*")) for entry in _READ
    )


_READ = (
    *READ,
    *(f"{RUN}.{key}" for key in keys_of(ACTOR)),
    *(name for key in keys_of(CRITIC) if (name := f"critic.{key}").removesuffix(".*") not in REFUSED),
)
"""Keys that are read, without those that only a critic's own `config` may set; in a run, the actor's apply to it."""
