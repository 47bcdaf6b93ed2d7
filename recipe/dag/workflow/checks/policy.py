"""Checks of policies: their models, critics, references and turns at training.

Invariant: a policy that passes has all that the algorithm asks of it, and nothing that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.interpolation import check_env
from recipe.dag.workflow.problem import KeyPath, Problem, did_you_mean
from recipe.dag.workflow.schema import Critic, Model, Policy
from recipe.dag.workflow.training_chain import critic_owners


def check_policies(draft: Draft) -> Iterator[Problem]:
    say = draft.source.problem
    used = {agent.policy for _, agent in draft.each_agent()}
    for name, policy in draft.policies.items():
        path: KeyPath = ("policies", name)
        if draft.whole and name not in used:
            yield say(path, f"no agent uses policy `{name}`; give it to one or remove it", key=True)
        if policy is None:
            continue
        yield from _check_model(draft, policy.model, (*path, "model"))
        yield from _check_reference(draft, name, policy)
        yield from _check_critic(draft, name, policy)
        for key in ("train_cycle", "lr"):
            if policy.frozen and getattr(policy, key) is not None:
                yield say((*path, key), "a frozen policy is not trained; remove it", key=True)
    if draft.algorithm.joint_critic:
        yield from _check_central(draft)
    cycling = [(name, policy) for name, policy in draft.each_policy() if policy.train_cycle and not policy.frozen]
    unread = any(problem.where.endswith(".train_cycle") for problem in draft.problems)
    if len(cycling) == 1 and draft.whole and not unread:
        message = f"only policy `{cycling[0][0]}` has a train_cycle, so nobody takes turns with it; remove it"
        yield say(("policies", cycling[0][0], "train_cycle"), message, key=True)


def warn_of_policies(draft: Draft) -> Iterator[Problem]:
    """What is legal, yet seldom meant."""
    cycles = {name: policy.train_cycle for name, policy in draft.each_policy() if policy.train_cycle}
    if len(set(cycles.values())) > 1:
        last = list(cycles)[-1]
        shown = ", ".join(f"{name} {cycle}" for name, cycle in cycles.items())
        message = f"the train_cycles differ ({shown}): in some steps several of these policies learn, in some none"
        yield draft.source.problem(("policies", last, "train_cycle"), message, key=True)


def _check_model(draft: Draft, model: Model, path: KeyPath) -> Iterator[Problem]:
    for key in ("path", "tokenizer_path"):
        text = getattr(model, key)
        if text is not None and not text.strip():
            yield draft.source.problem((*path, key), "must not be empty")
        elif text is not None and (wrong := check_env(text)):
            yield draft.source.problem((*path, key), wrong)


def _check_reference(draft: Draft, name: str, policy: Policy) -> Iterator[Problem]:
    say, algorithm = draft.source.problem, draft.algorithm
    path: KeyPath = ("policies", name)
    coefs = [key for key in ("kl_loss_coef", "kl_reward_coef") if getattr(algorithm, key) > 0]
    if policy.reference and policy.frozen:
        yield say((*path, "reference"), "a frozen policy needs no reference; remove it")
    elif policy.reference and not coefs and not any(_unread(draft, key) for key in ("kl_loss_coef", "kl_reward_coef")):
        message = (
            "nobody reads the reference while algorithm.kl_loss_coef and kl_reward_coef are 0; set one of them or "
            "remove `reference`"
        )
        yield say((*path, "reference"), message)
    elif not policy.reference and not policy.frozen and coefs:
        yield say(path, f"algorithm.{coefs[0]} is above 0, so policy `{name}` needs `reference: true`", key=True)


def _check_critic(draft: Draft, name: str, policy: Policy) -> Iterator[Problem]:
    say, critic = draft.source.problem, policy.critic
    path: KeyPath = ("policies", name, "critic")
    needed = draft.algorithm.needs_values
    if critic is None:
        if needed and not policy.frozen and not _spoilt(draft, name):
            message = f"estimator `{draft.algorithm.estimator}` needs a critic: give policy `{name}` `critic: {{}}`"
            yield say(path[:2], message, key=True)
        return
    if policy.frozen:
        yield say(path, "a frozen policy needs no critic; remove it", key=True)
    elif not (needed or draft.algorithm.may_read_values) and not _unread(draft, "estimator"):
        message = f"estimator `{draft.algorithm.estimator}` reads no values; remove the critic, or choose `gae`"
        yield say(path, message, key=True)
    if critic.model is not None:
        yield from _check_model(draft, critic.model, (*path, "model"))
        if critic.model.tokenizer_path is not None:
            message = "a critic reads the tokens of its policy; remove it"
            yield say((*path, "model", "tokenizer_path"), message, key=True)
    if critic.share is not None:
        yield from _check_share(draft, name, critic, path)


def _check_central(draft: Draft) -> Iterator[Problem]:
    """One critic for all policies that are trained."""
    owners = critic_owners(dict(draft.each_policy()))
    shared = [policy.critic.share for name, policy in draft.each_policy() if name in owners and policy.critic.share]
    centre = next((name for name in (*shared, *owners) if owners.get(name) == name), None)
    for name, owner in owners.items():
        if owner == name != centre and not _spoilt(draft, name):
            message = (
                f"estimator `{draft.algorithm.estimator}` has one critic, which reads what all say; that of `{centre}` "
                f"is the first, so write `critic: {{share: {centre}}}` here"
            )
            yield draft.source.problem(("policies", name, "critic"), message, key=True)


def _check_share(draft: Draft, name: str, critic: Critic, path: KeyPath) -> Iterator[Problem]:
    at = (*path, "share")
    say, target = draft.source.problem, critic.share
    for key in sorted(critic.model_fields_set - {"share"}):
        yield say((*path, key), f"the critic is that of policy `{target}`; set this there", key=True)
    if target == name:
        yield say(at, "a critic cannot share itself; remove `share`")
    elif target not in draft.policies:
        yield say(at, f"no policy `{target}`{did_you_mean(target, [n for n in draft.policies if n != name])}")
    elif (owner := draft.policies[target]) is None or _spoilt(draft, target):
        return  # reported there
    elif owner.critic is None:
        yield say(at, f"policy `{target}` has no critic to share; give it `critic: {{}}`")
    elif owner.critic.share == name:
        if list(draft.policies).index(name) < list(draft.policies).index(target):
            yield say(at, f"`{name}` and `{target}` share each other's critic; one of them must have its own")
    elif owner.critic.share is not None:
        yield say(at, f"policy `{target}` itself shares the critic of `{owner.critic.share}`; name that one")


def _spoilt(draft: Draft, policy: str) -> bool:
    """The policy's critic could not be read, or not all of it."""
    return any(problem.where.startswith(f"policies.{policy}.critic") for problem in draft.problems)


def _unread(draft: Draft, key: str) -> bool:
    """The user wrote the option of `algorithm`, but it could not be read."""
    return any(problem.where == f"algorithm.{key}" for problem in draft.problems)
