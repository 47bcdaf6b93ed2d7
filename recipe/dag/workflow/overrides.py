"""Overrides of verl's `actor_rollout_ref` and `critic`: the `config` of a policy, of its critic and, as in siiRL, of
nodes, which is folded into their policy's.

Invariant: a key has one value per policy; two nodes, or a node and its policy, that disagree are an error, and so is a
key that the workflow itself or nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from recipe.dag.workflow.checks.training import policy_of
from recipe.dag.workflow.dotted import flat
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.pieces import shown
from recipe.dag.workflow.problem import KeyPath, Problem, render_path
from recipe.dag.workflow.schema import Node, NodeRole, Policy
from recipe.dag.workflow.verl_keys import rows_key, why_not

READERS = (NodeRole.ROLLOUT, NodeRole.ACTOR, NodeRole.REFERENCE, NodeRole.CRITIC)


def check_overrides(draft: Draft) -> Iterator[Problem]:
    for index, node in draft.each_node():
        at: KeyPath = ("nodes", index, "config")
        if node.config and node.node_role not in READERS:
            yield draft.source.problem(at, f"a {node.node_role} node has no model to configure; remove it", key=True)
    given: dict[tuple[str, bool, str], tuple[Any, KeyPath]] = {}
    for policy, critic, key, value, path in _overrides(draft):
        if (message := why_not(key, critic=critic, policy=policy)) is not None:
            yield draft.source.problem(path, message, key=True)
            continue
        before, place = given.setdefault((policy, critic, key), (value, path))
        if before != value:
            where = render_path(draft.source.origin(place).path)
            message = f"policy `{policy}` has one value of `{key}`, but {where} says {shown(before)}"
            yield draft.source.problem(path, message, key=True)
    for (policy, critic, key), (value, path) in given.items():
        rows, dynamic = rows_key(critic)
        if key == rows and value is not None and given.get((policy, critic, dynamic), (False, ()))[0] is True:
            message = f"`{dynamic}` is true, so micro-batches are made by tokens and nothing reads this; remove one"
            yield draft.source.problem(path, message, key=True)


def with_overrides(draft: Draft) -> dict[str, Policy]:
    """The policies, each with its nodes' overrides in its `config` and its critic's, as dotted keys. Who gives
    micro-batches a number of rows means that they are made by rows."""
    config: dict[tuple[str, bool], dict[str, Any]] = {}
    for policy, critic, key, value, _ in _overrides(draft):
        config.setdefault((policy, critic), {})[key] = value
    for (_, critic), given in config.items():
        rows, dynamic = rows_key(critic)
        if given.get(rows) is not None:
            given.setdefault(dynamic, False)
    result = {}
    for name, policy in draft.policies.items():
        critic = policy.critic and policy.critic.model_copy(update={"config": config.get((name, True), {})})
        result[name] = policy.model_copy(update={"config": config.get((name, False), {}), "critic": critic})
    return result


@dataclass(frozen=True, slots=True)
class Override:
    """A key of verl's that a workflow sets, and where."""

    branch: str
    """`actor_rollout_ref` or `critic`"""
    key: str
    """Dotted."""
    value: Any
    place: Problem
    """Without a message."""

    def problem(self, message: str) -> Problem:
        return replace(self.place, message=message)


def placed_overrides(draft: Draft) -> Iterator[Override]:
    for _, critic, key, value, path in _overrides(draft):
        branch = "critic" if critic else "actor_rollout_ref"
        yield Override(branch, key, value, draft.source.problem(path, "", key=True))


def _overrides(draft: Draft) -> Iterator[tuple[str, bool, str, Any, KeyPath]]:
    """(policy, of its critic, dotted key, value, place) of every override, the policies' own first."""
    for name, policy in draft.each_policy():
        for key, value, path in flat(policy.config, ("policies", name, "config")):
            yield name, False, key, value, path
        critic = policy.critic.config if policy.critic else {}
        for key, value, path in flat(critic, ("policies", name, "critic", "config")):
            yield name, True, key, value, path
    for index, node in draft.each_node():
        owner = _owner(draft, index, node)
        for key, value, path in flat(node.config, ("nodes", index, "config")):
            if owner is not None:
                yield owner, node.node_role is NodeRole.CRITIC, key, value, path


def _owner(draft: Draft, index: int, node: Node) -> str | None:
    if node.node_role not in READERS:
        return None
    if node.node_role is not NodeRole.ROLLOUT:
        return policy_of(draft, index, node)
    agent = draft.agents[node.agent_group] if draft.agents else None
    return agent.policy if agent is not None and agent.policy in draft.policies else None
