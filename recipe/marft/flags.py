"""Translation of the flags of siiRL's MARFT script.

Invariant: every flag is in `FLAGS` under siiRL's name with the kind of its value. It becomes overrides of the run or
edits of the workflow, or is refused with a reason; no flag is silently dropped. Pure.
"""

from __future__ import annotations

from recipe.dag.core.errors import UserError
from recipe.dag.settings.kinds import (
    ABOVE_ONE,
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    PART,
    PATH,
    PATHS,
    POSITIVE,
    SHARE,
    TEXT,
    TRUTH,
    hydra_value,
    names,
    one_of,
    or_null,
    whole,
)
from recipe.dag.settings.values import ANY_KL, EVERY, TRACKERS
from recipe.dag.settings.verl_run import says_the_same
from recipe.dag.workflow.verl_keys import RUN, replacement
from recipe.marft.rules import (
    Edit,
    Errors,
    Flag,
    Translation,
    as_it_is,
    logger,
    only,
    refused,
    renamed,
    switched,
    tokens,
    workflow,
)

ACTOR, CRITIC, SERVER = f"{RUN}.actor", "critic", f"{RUN}.rollout"
TOP_K = whole(1, -1)
ONE_SIZE = f"all passes have the same size; pass {ACTOR}.ppo_micro_batch_size_per_gpu"

FLAGS: dict[str, Flag] = {
    "algorithm.adv_estimator": workflow("adv_estimator", one_of("gae_marft", "gae", "grpo", "cpgd")),
    "algorithm.gamma": workflow("algorithm.gamma", SHARE),
    "algorithm.lam": workflow("algorithm.lam", SHARE),
    "algorithm.share_reward_in_agent": workflow("algorithm.share_reward_in_agent", TRUTH),
    "algorithm.use_kl_in_reward": workflow("use_kl_in_reward", TRUTH),
    "algorithm.kl_ctrl.kl_coef": workflow("kl_reward_coef", NOT_NEGATIVE),
    "algorithm.kl_ctrl.type": only("fixed", TEXT, "the weight of the KL is constant"),
    "dag.workflow_path": renamed("workflow", PATH),
    "dag.custom_pipeline_fn": refused("graphs are YAML files here; pass dag.workflow_path=FILE", but=None),
    "dag.enable_perf": only(False, TRUTH, "every run measures times (timing/... in metrics.jsonl)"),
    "dag.backend_threshold": refused("verl chooses the communication backends"),
    "dag.env_enable": refused("set `env` of a node to an env", but=False),
    "dag.environment_path": refused("set `env` of a node to an env", but=None),
    f"{RUN}.model.path": renamed("model_path", PATH),
    f"{RUN}.model.use_remove_padding": as_it_is(TRUTH),
    f"{RUN}.model.enable_gradient_checkpointing": as_it_is(TRUTH),
    f"{SERVER}.name": only("sglang", TEXT, "SGLang is the only server on GPUs"),
    f"{SERVER}.mode": only("async", TEXT, "agents exchange token ids with the server, never text"),
    f"{SERVER}.agent.rewards_with_env": workflow("rewards_with_env", TRUTH),
    f"{SERVER}.agent.agent_name": refused("set the names under `agents` in the workflow"),
    f"{SERVER}.agent.num_workers": refused("pass rollout.processes=N, the number of processes that play episodes"),
    f"{SERVER}.agent.custom_async_server": refused("the server is always SGLang"),
    f"{SERVER}.multi_turn.enable": refused(f"pass {SERVER}.multi_turn.max_assistant_turns=N, 2 or more"),
    f"{SERVER}.multi_turn.max_assistant_turns": workflow("episode.max_turns", or_null(COUNT)),
    f"{SERVER}.multi_turn.use_all_traj": workflow("episode.train_turns", TRUTH),
    f"{SERVER}.n": as_it_is(COUNT),
    f"{SERVER}.temperature": workflow("sampling.temperature", POSITIVE),
    f"{SERVER}.top_p": workflow("sampling.top_p", PART),
    f"{SERVER}.top_k": workflow("sampling.top_k", TOP_K),
    f"{SERVER}.val_kwargs.n": renamed("validation.n", COUNT),
    f"{SERVER}.val_kwargs.temperature": workflow("validation.temperature", NOT_NEGATIVE),
    f"{SERVER}.val_kwargs.top_p": workflow("validation.top_p", PART),
    f"{SERVER}.val_kwargs.top_k": workflow("validation.top_k", TOP_K),
    f"{SERVER}.val_kwargs.do_sample": workflow("do_sample", TRUTH),
    f"{SERVER}.prompt_length": renamed("data.max_prompt_length", COUNT),
    f"{SERVER}.response_length": tokens(COUNT),
    f"{SERVER}.max_model_len": as_it_is(or_null(COUNT)),
    f"{SERVER}.tensor_model_parallel_size": as_it_is(COUNT),
    f"{SERVER}.gpu_memory_utilization": as_it_is(PART),
    f"{SERVER}.free_cache_engine": only(
        True, TRUTH, "servers release their memory while models train, otherwise two policies do not fit"
    ),
    f"{SERVER}.enforce_eager": as_it_is(TRUTH),
    f"{SERVER}.enable_chunked_prefill": switched(
        TRUTH, {True: None, False: (f"{SERVER}.engine_kwargs.sglang.chunked_prefill_size", "-1")}
    ),
    f"{SERVER}.log_prob_micro_batch_size_per_gpu": refused(ONE_SIZE),
    f"{RUN}.ref.log_prob_micro_batch_size_per_gpu": refused(ONE_SIZE),
    "data.train_files": as_it_is(PATHS),
    "data.val_files": as_it_is(or_null(PATHS)),
    "data.train_batch_size": as_it_is(COUNT),
    "data.max_prompt_length": as_it_is(COUNT),
    "data.max_response_length": tokens(COUNT),
    "data.return_raw_chat": only(True, TRUTH, "agents always get chat messages"),
    "data.filter_overlong_prompts": only(
        False, TRUTH, "an episode with a too long prompt ends without an answer (prompt_too_long)"
    ),
    "data.truncation": only("error", TEXT, "prompts are never truncated"),
    "data.shuffle": only(True, TRUTH, "`seed` determines the order of the samples"),
    f"{ACTOR}.optim.lr": workflow("policy.lr", POSITIVE),
    f"{ACTOR}.ppo_mini_batch_size": workflow("algorithm.mini_batch_size", COUNT),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": as_it_is(COUNT),
    f"{ACTOR}.use_dynamic_bsz": as_it_is(TRUTH),
    f"{ACTOR}.ppo_epochs": workflow("algorithm.epochs", COUNT),
    f"{ACTOR}.clip_ratio": workflow("clip_ratio", NOT_NEGATIVE),
    f"{ACTOR}.clip_ratio_low": workflow("algorithm.clip_ratio_low", NOT_NEGATIVE),
    f"{ACTOR}.clip_ratio_high": workflow("algorithm.clip_ratio_high", NOT_NEGATIVE),
    f"{ACTOR}.clip_ratio_c": workflow("algorithm.clip_ratio_c", ABOVE_ONE),
    f"{ACTOR}.entropy_coeff": workflow("algorithm.entropy_coef", FINITE),
    f"{ACTOR}.grad_clip": renamed(f"{ACTOR}.optim.clip_grad", POSITIVE),
    f"{ACTOR}.use_kl_loss": workflow("use_kl_loss", TRUTH),
    f"{ACTOR}.kl_loss_coef": workflow("kl_loss_coef", NOT_NEGATIVE),
    f"{ACTOR}.kl_loss_type": as_it_is(ANY_KL),
    "critic.model.path": workflow("critic.model", PATH),
    "critic.optim.lr": workflow("critic.lr", POSITIVE),
    "critic.cliprange_value": workflow("critic.cliprange_value", POSITIVE),
    "critic.grad_clip": renamed("critic.optim.clip_grad", POSITIVE),
    "critic.ppo_epochs": workflow("critic.epochs", COUNT),
    "critic.ppo_mini_batch_size": workflow("critic.mini_batch_size", COUNT),
    "critic.ppo_micro_batch_size_per_gpu": as_it_is(COUNT),
    "critic.use_dynamic_bsz": workflow("critic.config.use_dynamic_bsz", TRUTH),
    "trainer.critic_warmup": workflow("algorithm.critic_warmup", whole(0)),
    "trainer.total_epochs": workflow("total_epochs", COUNT),
    "trainer.val_before_train": as_it_is(TRUTH),
    "trainer.save_freq": as_it_is(EVERY),
    "trainer.test_freq": as_it_is(EVERY),
    "trainer.logger": logger(names(*TRACKERS)),
    "trainer.n_gpus_per_node": as_it_is(COUNT),
    "trainer.nnodes": as_it_is(COUNT),
}
"""siiRL's full name of a flag -> its translation."""
SHORT = ("rollout.", "actor.", "ref.", "model.")
"""Prefixes that abbreviate `actor_rollout_ref.rollout.` and so on."""
OWN = ("rollout.canary", "rollout.keep_base", "rollout.max_in_flight", "rollout.processes", "rollout.progress")
"""Keys of this engine that begin like an abbreviation."""


def translate(arguments: list[str], errors: Errors | None = None) -> Translation:
    """Translate `key=value` arguments; hydra's `+` and `++` before a flag have no effect, other keys are passed on.
    Arguments that cannot be translated are left out, and are lines of `errors`, or of a UserError without it.
    """
    out, problems = Translation(), errors or Errors()
    for argument in arguments:
        with problems.collected():
            _add(argument, out)
    problems.lines += _micro_batches(out)
    if errors is None:
        problems.check()
    return out


def _add(argument: str, out: Translation) -> None:
    name, equals, text = argument.partition("=")
    name = name.strip()
    key = name.lstrip("+~")
    sign, key = name[: len(name) - len(key)], full_name(key)
    if sign not in ("", "+", "++", "~") or not key or (not equals and sign != "~"):
        raise UserError(f"{argument}: write it as key=value")
    if any(flag.startswith(f"{key}.") for flag in FLAGS):
        raise UserError(f"{argument}: it is a group of keys; set them one by one")
    if key in FLAGS:
        if sign == "~":
            raise UserError(f"{argument}: a flag cannot be removed; leave it out, or pass {key}=VALUE")
        out.arguments[key] = FLAGS[key].kind.read(key, text)
        FLAGS[key].rule(out.arguments[key], out)
        return
    if not says_the_same(key, hydra_value(text)) and (reason := replacement(key)) is not None:
        raise UserError(f"{argument}: {reason}")
    out.overrides[f"{sign}{key}"] = text if equals else None


def full_name(key: str) -> str:
    return f"{RUN}.{key}" if key.startswith(SHORT) and key not in OWN else key


def _micro_batches(out: Translation) -> list[str]:
    """Return errors about micro-batches. By default they have a number of tokens; a number of rows turns that off."""
    errors = []
    for owner in (ACTOR, CRITIC):
        rows = out.arguments.get(f"{owner}.ppo_micro_batch_size_per_gpu")
        by_tokens = out.arguments.get(f"{owner}.use_dynamic_bsz")
        if rows is None:
            continue
        if by_tokens is not None and by_tokens.value is True:
            errors.append(f"{rows}: it has no effect with {by_tokens}; remove one of them")
        elif by_tokens is None and owner == ACTOR:
            out.overrides[f"{ACTOR}.use_dynamic_bsz"] = "False"
        elif by_tokens is None:
            out.edits["critic.config.use_dynamic_bsz"] = Edit(False, str(rows))
    return errors
