"""Checks of what weighs the policy loss, and of what it leaves out (`algorithm.importance`, `overlong`,
`drop_void_turns`).

Invariant: in a workflow that passes, each of these options has something to act on, and all log-probs that a weight
compares are computed before the update.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.blocks import OVERLONG
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.problem import KeyPath, Problem
from recipe.dag.workflow.schema import Agent, NodeRole


def check_loss(draft: Draft) -> Iterator[Problem]:
    """Needs a whole draft."""
    yield from _check_importance(draft)
    yield from _check_overlong(draft)
    trained = [agent for _, agent in draft.each_agent() if _learns(draft, agent)]
    if draft.algorithm.drop_void_turns and not any(agent.tools for agent in trained):
        message = "a void turn is one without code or answer, and no agent that learns has tools; remove it"
        yield draft.source.problem(("algorithm", "drop_void_turns"), message, key=True)


def _learns(draft: Draft, agent: Agent) -> bool:
    policy = draft.policies.get(agent.policy)  # another check reports an unknown one
    return policy is not None and not policy.frozen


def _check_overlong(draft: Draft) -> Iterator[Problem]:
    overlong, say, path = draft.algorithm.overlong, draft.source.problem, ("algorithm", "overlong")
    if overlong is None:
        return
    if not overlong.mask and overlong.penalty is None:
        yield say(path, "neither `mask: true` nor a `penalty`, so it does nothing; add one, or remove it", key=True)
    if overlong.penalty is None:
        return
    mixer = draft.algorithm.team_value
    if mixer is not None and mixer.loss == "binary":
        message = "it makes returns negative, and `mixer.loss: binary` needs them between 0 and 1; use `squared`"
        yield say((*path, "penalty"), message, key=True)
    for _, agent in draft.each_agent():
        limit = agent.sampling.max_tokens
        if _learns(draft, agent) and overlong.penalty.buffer > limit:
            message = f"agent `{agent.name}` generates {limit} tokens at most; make it smaller"
            yield say((*path, "penalty", "buffer"), message)
    for index, node in draft.each_node():
        if node.node_id == OVERLONG:
            message = f"the penalty for length is the part `{OVERLONG}` of a reward; name this node otherwise"
            yield say(("nodes", index, "node_id"), message)


def _check_importance(draft: Draft) -> Iterator[Problem]:
    path: KeyPath = ("algorithm", "importance")
    if draft.algorithm.importance is None:
        return
    if draft.algorithm.old_log_probs == "rollout":
        message = "with `old_log_probs: rollout` every ratio is taken against the server already; remove one of the two"
        yield draft.source.problem(path, message, key=True)
    else:
        yield from check_forward_passes(draft, path)


def check_forward_passes(draft: Draft, path: KeyPath) -> Iterator[Problem]:
    """Yield a problem at `path` where a declared training chain updates a policy without its old log-probs."""
    actors = [node for _, node in draft.each_node() if node.node_role is NodeRole.ACTOR]
    updates = sum(not node.only_forward_compute for node in actors)
    if updates > len(actors) - updates:
        message = "every policy needs an ACTOR node with `only_forward_compute: true`; add the missing ones"
        yield draft.source.problem(path, message, key=True)
