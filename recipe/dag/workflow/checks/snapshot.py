"""Checks of snapshots: the policy that they are a past self of, and what stands there in its place.

Invariant: a snapshot that passes is frozen and has a trained source with a model of the run, and no option that the
source determines.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.agent_schema import Policy
from recipe.dag.workflow.draft import Draft


def check_snapshot(draft: Draft, policy: Policy, source: str, path: KeyPath) -> Iterator[Problem]:
    """Check a policy with `snapshot_of: source`; `path` is the policy's."""
    problem = draft.source.problem
    for key in ("model", "lora", "api", "config"):
        if key in policy.model_fields_set:
            yield problem((*path, key), f"a snapshot has the `{key}` of policy `{source}`; remove it", key=True)
    if not policy.frozen:
        yield problem((*path, "frozen"), "a snapshot is never trained; remove `frozen`", key=True)
    if policy.every is None and not draft.reported(*path, "every"):
        message = "a snapshot needs `every`, the number of steps after which it becomes the policy's present self"
        yield problem((*path, "snapshot_of"), message, key=True)
    yield from _check_source(draft, source, path)


def check_every(draft: Draft, path: KeyPath) -> Iterator[Problem]:
    """Yield the problem of an `every` without `snapshot_of`."""
    if draft.has(*path, "every") and not draft.reported(*path, "snapshot_of"):
        message = "`every` has no effect without `snapshot_of: POLICY`; add that, or remove this"
        yield draft.source.problem((*path, "every"), message, key=True)


def _check_source(draft: Draft, source: str, path: KeyPath) -> Iterator[Problem]:
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
