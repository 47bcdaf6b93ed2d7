"""Checks of adapters: their base, what stands there in their place, and what they cannot have.

Invariant: an adapter that passes has a frozen base with a model of the run, and no option that its base or its folder
determines.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.agent_schema import Lora, Policy
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.interpolation import check_env

INHERITED: tuple[str, ...] = ("model", "config")
"""Fields of a policy that it has from its `parent`."""


def check_lora(draft: Draft, policy: Policy, lora: Lora, path: KeyPath) -> Iterator[Problem]:
    """Check a policy with a `lora`; `path` is the policy's."""
    problem = draft.source.problem
    for key, message in (
        ("model", "an adapter has the model of its base; remove `model` or `lora`"),
        ("gpus", f"an adapter is on the GPUs of its base; set this in `policies.{lora.base}`"),
    ):
        if key in policy.model_fields_set:
            yield problem((*path, key), message, key=True)
    if policy.reference is not None and policy.reference.refresh is not None:
        message = (
            "the reference of an adapter is its base, which stays; remove this, or write `model` in place of `lora`"
        )
        yield problem((*path, "reference", "refresh"), message, key=True)
    if not lora.targets:
        yield problem((*path, "lora", "targets"), "must not be empty; write `all-linear`, or names of linear layers")
    yield from _check_base(draft, lora, path)
    yield from _check_folder(draft, policy, lora, path)


def _check_base(draft: Draft, lora: Lora, path: KeyPath) -> Iterator[Problem]:
    here, name = (*path, "lora", "base"), str(path[-1])
    if lora.base not in draft.policies:
        others = [other for other in draft.policies if other != name]
        yield draft.source.problem(here, f"no policy `{lora.base}`{did_you_mean(lora.base, others)}")
        return
    base = draft.policies[lora.base]
    if base is None:
        return  # reported there
    if lora.base == name:
        yield draft.source.problem(here, "an adapter cannot be its own base; name the policy that has the model")
    elif base.lora is not None:
        yield draft.source.problem(here, f"policy `{lora.base}` is itself an adapter; write its base, {base.lora.base}")
    elif base.api is not None:
        yield draft.source.problem(here, f"policy `{lora.base}` is behind an API; an adapter needs a model of the run")
    elif not base.frozen:
        message = f"policy `{lora.base}` is trained, and an adapter needs weights that stay; write `frozen: true` there"
        yield draft.source.problem(here, message)


def _check_folder(draft: Draft, policy: Policy, lora: Lora, path: KeyPath) -> Iterator[Problem]:
    problem, here = draft.source.problem, (*path, "lora")
    if lora.path is None:
        if policy.frozen:
            message = f"without `lora.path`, a frozen adapter is its base; use policy `{lora.base}`, or remove this"
            yield problem((*path, "frozen"), message, key=True)
        return
    if not lora.path.strip():
        yield problem((*here, "path"), "must not be empty")
    elif message := check_env(lora.path):
        yield problem((*here, "path"), message)
    for key in ("rank", "alpha", "targets"):
        if key in lora.model_fields_set:
            yield problem((*here, key), "the folder at `path` determines this; remove it", key=True)
    if policy.critic is not None and policy.critic.rank is not None:
        message = "the critic starts at `lora.path`, too, whose folder determines this; remove it"
        yield problem((*path, "critic", "rank"), message, key=True)
    if policy.reference and not policy.frozen:
        message = "the reference would be the base, not the adapter at `lora.path`; remove one of the two"
        yield problem((*path, "reference"), message, key=True)


def with_bases(policies: dict[str, Policy]) -> dict[str, Policy]:
    """Return the policies, adapters with the model and the `config` of their base, snapshots with those of what they
    are snapshots of."""
    result = dict(policies)
    for name, policy in policies.items():
        if (parent := policy.parent) is not None:
            inherited = {key: getattr(policies[parent], key) for key in INHERITED}
            result[name] = policy.model_copy(update=inherited)
    return result
