"""Checks of the run's configuration against the workflow: keys without an effect, and samples with too few episodes.

Invariant: `check_effects` checks typed keys only. A configuration file serves many workflows, so it may set keys that
one of them does not need; a typed key is meant for this run. `check_samples` is a function of the configuration and the
workflow. Both run before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.dag.core.errors import UserError, raise_all
from recipe.dag.settings.learned_config import repeated_keys
from recipe.dag.settings.typed import Typed
from recipe.dag.settings.verl_run import says_the_same
from recipe.dag.workflow.moves import pooled
from recipe.dag.workflow.overrides import OWN_OF_CRITICS
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.verl_keys import RUN


def _is(value: Any) -> Callable[[Any], bool]:
    return lambda other: other == value


def _is_set(value: Any) -> bool:
    return value is not None


_ACTOR, _FSDP, _OPTIMIZER = f"{RUN}.actor", f"{RUN}.actor.fsdp_config", f"{RUN}.actor.optim"
_SERVER = ("sandbox.url", _is_set, "the run's own sandbox does not read it, only a server at sandbox.url=...")
_OWN = ("sandbox.url", _is(None), "the server at sandbox.url isolates programs as it was started; remove it")
_BY_ROWS = ("use_dynamic_bsz", _is(False), "micro-batches are made by tokens; add {}=false to make them by rows")
_BY_TOKENS = ("use_dynamic_bsz", _is(True), "micro-batches are made by rows; add {}=true to make them by tokens")
_COSINE = ("optim.lr_scheduler_type", _is("cosine"), "only a cosine schedule reads it; add {}=cosine")
_CHUNKS = ("entropy_from_logits_with_chunking", _is(True), "the entropy is not computed in chunks; add {}=true")
_PADDED = ("pad_to_length", _is(True), "rows are not padded to a length; add {}=true")

Need = tuple[str, Callable[[Any], bool], str]
"""(another key, a predicate that its value must satisfy, the error message otherwise; `{}` is the other key)"""


def _under(branch: str, need: Need) -> Need:
    return (f"{branch}.{need[0]}", *need[1:])


NEEDS: dict[str, Need] = {
    **dict.fromkeys(("sandbox.margin_s", "sandbox.token"), _SERVER),
    **dict.fromkeys(("sandbox.isolation", "sandbox.accept_unsandboxed"), _OWN),
    "data.val_max_samples": ("validation.max_samples", _is(None), "`{}` says this; set that one"),
    "validation.metrics_freq": (
        "validation.metrics",
        _is_set,
        "it is how often that is called; add {}=file.py:function",
    ),
    "report.on_flag": ("report.monitors", bool, "no rule is on; add {}=all"),
    "trainer.resume_from_path": (
        "trainer.resume_mode",
        lambda mode: mode in ("resume_path", "force"),
        "only the modes resume_path and force read it; add {}=resume_path",
    ),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _under(_ACTOR, _BY_ROWS),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": _under(_ACTOR, _BY_TOKENS),
    f"{RUN}.rollout.log_prob_max_token_len_per_gpu": _under(_ACTOR, _BY_TOKENS),
    f"{RUN}.ref.log_prob_max_token_len_per_gpu": _under(_ACTOR, _BY_TOKENS),
    "critic.ppo_micro_batch_size_per_gpu": _under(_ACTOR, _BY_ROWS),
    "critic.ppo_max_token_len_per_gpu": _under(_ACTOR, _BY_TOKENS),
    **{f"{_OPTIMIZER}.{key}": _under(_ACTOR, _COSINE) for key in ("min_lr_ratio", "num_cycles", "zero_indexed_step")},
    **{f"critic.optim.{key}": _under("critic", _COSINE) for key in ("min_lr_ratio", "num_cycles", "zero_indexed_step")},
    f"{_ACTOR}.entropy_from_logits_chunk_size": _under(_FSDP, _CHUNKS),
    f"{_FSDP}.entropy_from_logits_chunk_size": _under(_FSDP, _CHUNKS),
    **{f"{at}.pad_to_length_bucket": _under(at, _PADDED) for at in (_FSDP, f"{RUN}.ref.fsdp_config", "critic.fsdp")},
}
"""Typed keys that have an effect only with a certain value of another key."""
_ALIASED = ("model_path", "validation.temperature", "data.max_prompt_length", "data.max_response_length")
"""Keys that a configuration file may set from another key, such as `default_agent.pretrain`."""
_SCHEDULE_BY_OLD_NAME = "warmup_style"
_INTERPRETER = "code_interpreter"
_OF_PROGRAMS = {"sandbox.timeout_s": "timeout_s", "sandbox.memory_mb": "memory_mb"}
"""Typed keys that are defaults of the code interpreter's options -> the option."""
_OF_SERVED_POLICIES = {
    "data.max_prompt_length": "the server of the model limits prompts, no policy is served by the run; remove it",
    "data.max_response_length": "no policy is served by the run; pass workflow.agents.*.sampling.max_tokens=N, which a "
    "server is asked for",
}
"""Typed keys that limit the policies that the run serves itself -> the message if there are none."""


def check_effects(
    typed: Mapping[str, Typed],
    config: DictConfig,
    workflow: Workflow,
    *,
    evaluate_only: bool = False,
    all_by_api: bool = False,
) -> None:
    """Raise UserError with a line for each typed key that nothing in this run reads.

    `config` is the composed configuration. An evaluation accepts keys of the training, so that one command line serves
    both. all_by_api: a server's model plays every policy."""
    aliases = repeated_keys(config)
    typed = {**{key: typed[aliases[key]] for key in _ALIASED if aliases.get(key) in typed}, **typed}
    # a null asks for nothing, and a value that describes what happens anyway needs no effect
    typed = {
        key: setting
        for key, setting in typed.items()
        if setting.value is not None and not says_the_same(key, setting.value)
    }
    all_by_api = all_by_api or not workflow.local_policies()
    problems = _without_effect(typed, config, workflow, all_by_api=all_by_api)
    wrong = [f"{typed[key].argument}: {message}" for key, message in problems]
    if not evaluate_only:
        wrong += [f"{typed[key].argument}: {message}" for key, message in _not_trained(typed, config, workflow)]
    raise_all(wrong)


def _without_effect(
    typed: Mapping[str, Typed], config: DictConfig, workflow: Workflow, *, all_by_api: bool
) -> Iterator[tuple[str, str]]:
    """Yield (key, message) of keys without an effect, whether the run trains or not."""
    for key in typed:
        if key.startswith(("sandbox.", "data.")) and (message := _unmet(key, config, workflow)) is not None:
            yield key, message
    for key in sorted(typed.keys() & _OF_PROGRAMS.keys()):
        if (message := _of_no_program(_OF_PROGRAMS[key], workflow)) is not None:
            yield key, message
    if all_by_api:
        yield from ((key, message) for key, message in _OF_SERVED_POLICIES.items() if key in typed)
    if "model_path" in typed and config.model_path and not asks_for_model_path(workflow):
        message = "no policy's model is ${oc.env:MODEL_PATH}; set `policies.<name>.model.path` in the workflow"
        yield "model_path", message


def _of_no_program(option: str, workflow: Workflow) -> str | None:
    """Return the message for a default that no program of the workflow takes: that of the code interpreter's `option`.
    Environments limit their programs themselves."""
    users = [
        (node, tool)
        for node in workflow.rollout_nodes
        for tool in workflow.agent_of(node).tools
        if tool.name == _INTERPRETER and tool.path is None
    ]
    if not users:
        return f"no agent has the tool {_INTERPRETER}, and environments limit their programs themselves; remove it"
    for node, tool in users:
        if option in tool.options((option,)):
            continue
        if option != "timeout_s" or node.parse_options.get("code_timeout") is None:
            return None
    own = f"`{option}` of the tool" + (" or `code_timeout` of the hooks" if option == "timeout_s" else "")
    return f"every program has a limit in the workflow ({own}); set it there"


def asks_for_model_path(workflow: Workflow) -> bool:
    """Return whether a model of the workflow is ${oc.env:MODEL_PATH}."""
    models = [policy.model for policy in workflow.policies.values()]
    models += [policy.critic.model for policy in workflow.policies.values() if policy.critic is not None]
    if workflow.algorithm.team_value is not None:
        models.append(workflow.algorithm.team_value.encoder.model)
    return any(model is not None and "oc.env:MODEL_PATH" in model.path for model in models)


def _not_trained(typed: Mapping[str, Typed], config: DictConfig, workflow: Workflow) -> Iterator[tuple[str, str]]:
    """Yield (key, message) of keys without an effect on training."""
    trained = [workflow.policies[name] for name in workflow.trained_policies()]
    critics = [policy.critic for policy in trained if policy.critic is not None and policy.critic.share is None]
    for key in typed:
        branch, _, rest = key.partition(".")
        message = None if key.startswith(("sandbox.", "data.")) else _unmet(key, config, workflow)
        owners = critics if branch == "critic" else trained
        if key == "validation.temperature":
            message = "only `verl-dag eval` reads it; write `validation: {temperature: ...}` of the agents"
        elif key == "report.conversations_file":
            message = "only `verl-dag eval` writes it; remove it"
        elif branch == "critic" and not critics:
            message = f"no policy of the workflow has a critic (estimator {workflow.algorithm.estimator}); remove it"
        elif key.startswith(f"{RUN}.ref.") and not any(policy.reference for policy in trained):
            message = "no policy keeps a reference (`reference: true`, for a KL or estimator spin); remove it"
        elif key == f"{RUN}.actor.kl_loss_type" and not workflow.algorithm.kl_loss_coef:
            message = "there is no KL in the loss; set `algorithm.kl_loss_coef` in the workflow"
        elif key in (f"{_OPTIMIZER}.lr", "critic.optim.lr") and all(owner.lr is not None for owner in owners):
            message = _decided_by(
                [owner.lr for owner in owners], typed[key], "critic.lr" if branch == "critic" else "lr"
            )
        elif branch in (RUN, "critic") and owners and all(rest in owner.config for owner in owners):
            where = "critic.config" if branch == "critic" else "config"
            message = _decided_by([owner.config[rest] for owner in owners], typed[key], where)
        if message is not None:
            yield key, message


def _decided_by(values: list[Any], setting: Typed, where: str) -> str | None:
    """Return the message for a setting that the workflow makes for each policy; None if it makes the same one."""
    if all(value == setting.value for value in values):
        return None
    written = " and ".join(dict.fromkeys(map(str, values)))
    return f"the workflow itself says {written} (`policies.<name>.{where}`, or `config` of nodes); set it there"


def _unmet(key: str, config: DictConfig, workflow: Workflow) -> str | None:
    """Return the message for a key that needs another key's value, if that key has a different one, or policies with
    whole weights, if there are none."""
    trained = [workflow.policies[name] for name in workflow.trained_policies()]
    if trained and all(policy.lora is not None for policy in trained):
        if key.startswith((f"{RUN}.actor.checkpoint.", "critic.checkpoint.")):
            return "a checkpoint always has all of an adapter; remove it"
        if key.startswith("critic.") and not key.removeprefix("critic.").startswith(OWN_OF_CRITICS):
            return "critics of adapters are computed by their base's trainer; set this below actor_rollout_ref"
    if key not in NEEDS:
        return None
    other, fits, message = NEEDS[key]
    branch, _, rest = other.partition(".")
    policies = workflow.policies.values()
    configs = [policy.config for policy in policies] if branch == RUN else []
    configs += [policy.critic.config for policy in policies if policy.critic is not None]
    overridden = {name.rpartition(".")[2] for own_config in configs for name in own_config}
    schedule = OmegaConf.select(config, f"{other.rpartition('.')[0]}.{_SCHEDULE_BY_OLD_NAME}")
    if rest.rpartition(".")[2] in overridden or fits(OmegaConf.select(config, other)) or fits(schedule) and schedule:
        return None
    return message.format(other)


def check_samples(run: DictConfig, workflow: Workflow) -> None:
    """Raise UserError if credit compares the episodes of a sample and the run has one episode per sample."""
    if int(run.actor_rollout_ref.rollout.n) > 1:
        return
    of_group = next((node.id for node in workflow.reward_nodes if node.scope == "group"), None)
    if of_group is not None:
        raise UserError(
            f"{run.workflow}: the reward node `{of_group}` compares the episodes of a sample (`scope: group`); set "
            "actor_rollout_ref.rollout.n to at least 2"
        )
    if workflow.algorithm.uncertainty is not None:
        raise UserError(
            f"{run.workflow}: algorithm.uncertainty compares the episodes of a sample; set "
            "actor_rollout_ref.rollout.n to at least 2, or remove it"
        )
    if workflow.algorithm.pairs_calls:
        with_candidates = any(node.candidates is not None for node in workflow.rollout_nodes)
        if workflow.algorithm.given_text is None and not with_candidates and _is_alone_in_groups(workflow):
            raise UserError(
                f"algorithm.estimator: {workflow.algorithm.estimator}: pairs need two answers to one prompt; set "
                "actor_rollout_ref.rollout.n to at least 2, or give a node `candidates`"
            )
    elif workflow.algorithm.forks is not None:
        return  # an episode is compared with its forks
    elif workflow.algorithm.team_value is not None or workflow.algorithm.grouping and _is_alone_in_groups(workflow):
        raise UserError(
            f"algorithm.estimator: {workflow.algorithm.estimator} needs at least 2 episodes per sample; set "
            "actor_rollout_ref.rollout.n=2 or more"
        )


def _is_alone_in_groups(workflow: Workflow) -> bool:
    """Return whether each group contains at most one trajectory of an episode."""
    group_by = workflow.algorithm.grouping
    if "uid" not in group_by:
        return False
    agent_of = {node.id: node.agent for node in workflow.rollout_nodes}
    graph = (workflow.rollout_nodes, workflow.loops, workflow.agents, workflow.episode)
    groups = pooled(*graph, workflow.trained_policies(), group_by)
    return all(len({agent_of[move.node] for move in group}) == 1 for group in groups)
