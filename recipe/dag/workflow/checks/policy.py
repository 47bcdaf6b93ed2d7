"""Checks of policies: models, snapshots, critics, references and alternating training.

Invariant: a policy that passes has everything that the algorithm needs, and nothing without an effect.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.types.model import Model
from recipe.dag.workflow.agent_schema import Critic, Policy, critic_owners
from recipe.dag.workflow.checks.api import check_api
from recipe.dag.workflow.checks.lora import check_lora
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.interpolation import check_env

KL = ("kl_loss_coef", "kl_reward_coef")
"""The options of the algorithm that read a policy's reference."""


def check_policies(draft: Draft, references: References) -> Iterator[Problem]:
    problem = draft.source.problem
    used = {agent.policy for _, agent in draft.each_agent()}
    used |= {policy.lora.base for _, policy in draft.each_policy() if policy.lora is not None}
    for name, policy in draft.policies.items():
        path: KeyPath = ("policies", name)
        if draft.complete and name not in used:
            yield problem(path, f"no agent uses policy `{name}`; use it or remove it", key=True)
        if policy is None:
            continue
        yield from _check_source(draft, references, name, policy)
        yield from _check_reference(draft, name, policy)
        yield from _check_critic(draft, name, policy)
        for key in ("train_cycle", "lr"):
            if policy.frozen and getattr(policy, key) is not None:
                yield problem((*path, key), f"`{key}` has no effect on a frozen policy; remove it", key=True)
    if draft.algorithm.joint_critic:
        yield from _check_central(draft)
    cycling = [(name, policy) for name, policy in draft.each_policy() if policy.train_cycle and not policy.frozen]
    unread = any(draft.reported("policies", name, "train_cycle") for name in draft.policies)
    if len(cycling) == 1 and draft.complete and not unread:
        message = f"only policy `{cycling[0][0]}` has a `train_cycle`, so it does not alternate with another; remove it"
        yield problem(("policies", cycling[0][0], "train_cycle"), message, key=True)


def warn_of_policies(draft: Draft) -> Iterator[Problem]:
    """Warn of policies with different `train_cycle`s, which are allowed but rarely intended."""
    cycles = {name: policy.train_cycle for name, policy in draft.each_policy() if policy.train_cycle}
    if len(set(cycles.values())) > 1:
        last = list(cycles)[-1]
        by_policy = ", ".join(f"{name} {cycle}" for name, cycle in cycles.items())
        message = f"the train_cycles differ ({by_policy}): some steps update several of these policies, others none"
        yield draft.source.problem(("policies", last, "train_cycle"), message, key=True)


def _check_source(draft: Draft, references: References, name: str, policy: Policy) -> Iterator[Problem]:
    """Check the model of a policy, or the API, adapter or snapshot in its place."""
    path: KeyPath = ("policies", name)
    if policy.snapshot_of is not None:
        yield from _check_snapshot(draft, policy, policy.snapshot_of, path)
        return
    yield from _check_every(draft, path)
    if policy.api is not None:
        yield from check_api(draft, policy, policy.api, path)
        if policy.api.script is not None:
            yield from references.check_script(policy.api.script, (*path, "api", "script"))
    elif policy.lora is not None:
        yield from check_lora(draft, policy, policy.lora, path)
    elif "model" in policy.model_fields_set:
        yield from _check_model(draft, policy.model, (*path, "model"))
    elif not any(draft.reported(*path, key) for key in ("api", "lora", "snapshot_of")):
        yield draft.source.problem((*path, "model"), "missing; this key is required")


def _check_snapshot(draft: Draft, policy: Policy, source: str, path: KeyPath) -> Iterator[Problem]:
    """Check a policy with `snapshot_of: source`; `path` is the policy's. One that passes is frozen and has a trained
    source with a model of the run, and no option that the source determines."""
    problem = draft.source.problem
    for key in ("model", "lora", "api", "config"):
        if key in policy.model_fields_set:
            yield problem((*path, key), f"a snapshot has the `{key}` of policy `{source}`; remove it", key=True)
    if not policy.frozen:
        yield problem((*path, "frozen"), "a snapshot is never trained; remove `frozen`", key=True)
    if policy.every is None and not draft.reported(*path, "every"):
        message = "a snapshot needs `every`, the number of steps after which it becomes the policy's present self"
        yield problem((*path, "snapshot_of"), message, key=True)
    yield from _check_past_self(draft, source, path)


def _check_every(draft: Draft, path: KeyPath) -> Iterator[Problem]:
    if draft.has(*path, "every") and not draft.reported(*path, "snapshot_of"):
        message = "`every` has no effect without `snapshot_of: POLICY`; add that, or remove this"
        yield draft.source.problem((*path, "every"), message, key=True)


def _check_past_self(draft: Draft, source: str, path: KeyPath) -> Iterator[Problem]:
    here, name = (*path, "snapshot_of"), str(path[-1])
    if source not in draft.policies:
        others = [other for other in draft.policies if other != name]
        yield draft.source.problem(here, f"no policy `{source}`{did_you_mean(source, others)}")
        return
    policy = draft.policies[source]
    if policy is None:
        return  # reported there
    if source == name:
        yield draft.source.problem(here, "a snapshot cannot be its own source; name the policy that is trained")
    elif policy.snapshot_of is not None:
        yield draft.source.problem(here, f"policy `{source}` is itself a snapshot; write {policy.snapshot_of}")
    elif policy.api is not None:
        yield draft.source.problem(here, f"policy `{source}` is behind an API; a snapshot needs weights of the run")
    elif policy.lora is not None:
        message = f"policy `{source}` is an adapter, of which there are no snapshots; train a policy with a `model`"
        yield draft.source.problem(here, message)
    elif policy.frozen:
        yield draft.source.problem(here, f"policy `{source}` is frozen, so it has no past selves; use it directly")


def _check_model(draft: Draft, model: Model, path: KeyPath) -> Iterator[Problem]:
    for key in ("path", "tokenizer_path"):
        text = getattr(model, key)
        if text is not None and not text.strip():
            yield draft.source.problem((*path, key), "must not be empty")
        elif text is not None and (message := check_env(text)):
            yield draft.source.problem((*path, key), message)


def _check_reference(draft: Draft, name: str, policy: Policy) -> Iterator[Problem]:
    problem, algorithm = draft.source.problem, draft.algorithm
    path: KeyPath = ("policies", name)
    needs = [f"algorithm.{key} is above 0" for key in KL if getattr(algorithm, key) > 0]
    needs += [f"estimator `{algorithm.estimator}` compares with it"] if algorithm.pairs_calls else []
    if policy.reference and policy.frozen:
        yield problem((*path, "reference"), "a frozen policy needs no reference; remove it")
    elif policy.reference and not needs and not any(draft.reported("algorithm", key) for key in (*KL, "estimator")):
        message = (
            "`reference` has no effect while algorithm.kl_loss_coef and kl_reward_coef are 0; set one of them or "
            "remove `reference`"
        )
        yield problem((*path, "reference"), message)
    elif not policy.reference and not policy.frozen and needs and not draft.reported(*path, "reference"):
        yield problem(path, f"{needs[0]}, so policy `{name}` needs `reference: true`", key=True)


def _check_critic(draft: Draft, name: str, policy: Policy) -> Iterator[Problem]:
    problem, critic = draft.source.problem, policy.critic
    path: KeyPath = ("policies", name, "critic")
    needed = draft.algorithm.needs_values
    if critic is None:
        if needed and not policy.frozen and not draft.reported("policies", name, "critic"):
            message = f"estimator `{draft.algorithm.estimator}` needs a critic; add `critic: {{}}` to policy `{name}`"
            yield problem(path[:2], message, key=True)
        return
    if policy.frozen:
        yield problem(path, "a frozen policy needs no critic; remove it", key=True)
    elif not (needed or draft.algorithm.may_read_values) and not draft.reported("algorithm", "estimator"):
        message = f"estimator `{draft.algorithm.estimator}` does not use values; remove the critic, or choose `gae`"
        yield problem(path, message, key=True)
    if critic.rank is not None and policy.lora is None:
        yield problem((*path, "rank"), "only the critic of an adapter has a rank; remove it", key=True)
    if critic.model is not None and policy.lora is not None:
        message = "the critic of an adapter is on the model of its base; remove it"
        yield problem((*path, "model"), message, key=True)
    elif critic.model is not None:
        yield from _check_model(draft, critic.model, (*path, "model"))
        if critic.model.tokenizer_path is not None:
            message = "a critic reads the tokens of its policy; remove `tokenizer_path`"
            yield problem((*path, "model", "tokenizer_path"), message, key=True)
    if critic.share is not None:
        yield from _check_share(draft, name, critic, critic.share, path)


def _check_central(draft: Draft) -> Iterator[Problem]:
    """Check that the trained policies of each model share one critic. Models may have different vocabularies, and a
    critic reads token ids."""
    policies = dict(draft.each_policy())
    owners = critic_owners(policies)
    shared = [owner for name, owner in owners.items() if owner != name]
    central: dict[tuple[str, str | None], str] = {}
    for name in (*shared, *owners):
        if owners.get(name) == name:
            central.setdefault(_vocabulary(draft, policies[name]), name)
    for name, owner in owners.items():
        first = central[_vocabulary(draft, policies[name])] if owner == name else name
        if first != name and not draft.reported("policies", name, "critic"):
            message = (
                f"estimator `{draft.algorithm.estimator}` needs one critic for all policies of a model; write "
                f"`critic: {{share: {first}}}` here"
            )
            yield draft.source.problem(("policies", name, "critic"), message, key=True)


def _vocabulary(draft: Draft, policy: Policy) -> tuple[str, str | None]:
    base = policy if policy.lora is None else draft.policies.get(policy.lora.base) or policy
    return base.model.path, base.model.tokenizer_path


def _check_share(draft: Draft, name: str, critic: Critic, target: str, path: KeyPath) -> Iterator[Problem]:
    share_path = (*path, "share")
    problem = draft.source.problem
    for key in sorted(critic.model_fields_set - {"share"}):
        yield problem((*path, key), f"the critic is that of policy `{target}`; set this there", key=True)
    if target == name:
        yield problem(share_path, "a critic cannot share itself; remove `share`")
    elif target not in draft.policies:
        other_names = [other for other in draft.policies if other != name]
        yield problem(share_path, f"no policy `{target}`{did_you_mean(target, other_names)}")
    elif (owner := draft.policies[target]) is None or draft.reported("policies", target, "critic"):
        return  # reported there
    elif owner.critic is None:
        yield problem(share_path, f"policy `{target}` has no critic to share; add `critic: {{}}` to it")
    elif owner.critic.share == name:
        # reported once, at the first of the two
        if list(draft.policies).index(name) < list(draft.policies).index(target):
            message = f"`{name}` and `{target}` share each other's critic; remove `share` from one of them"
            yield problem(share_path, message)
    elif owner.critic.share is not None:
        message = f"policy `{target}` itself shares a critic; write `share: {owner.critic.share}`"
        yield problem(share_path, message)
