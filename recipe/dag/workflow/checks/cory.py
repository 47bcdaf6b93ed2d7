"""Checks of role exchange (`algorithm.cory`): different agents with different policies, all of them trained."""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.problem import Problem, did_you_mean


def check_cory(draft: Draft) -> Iterator[Problem]:
    cory, say, path = draft.algorithm.cory, draft.source.problem, ("algorithm", "cory", "roles")
    if cory is None:
        return
    if len(cory.roles) < 2:
        yield say(path, "an exchange needs at least two agents")
    policy_of, taken = {agent.name: agent.policy for _, agent in draft.each_agent()}, dict[str, str]()
    for position, role in enumerate(cory.roles):
        at, policy = (*path, position), policy_of.get(role)
        if policy is None:
            yield say(at, f"no agent `{role}`{did_you_mean(role, list(policy_of))}")
        elif policy in taken:
            yield say(at, f"`{role}` has policy `{policy}`, like `{taken[policy]}`: nothing to exchange")
        elif draft.policies[policy].frozen:
            yield say(at, f"policy `{policy}` of `{role}` is frozen; an exchange is between policies that are trained")
        else:
            taken[policy] = role
