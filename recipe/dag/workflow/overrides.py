"""A node's `config`: siiRL's place for overrides of verl's `actor_rollout_ref`, folded into the node's policy.

Invariant: a key has one value per policy; two nodes, or a node and its policy, that disagree are an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.pieces import shown
from recipe.dag.workflow.problem import KeyPath, Problem, render_path
from recipe.dag.workflow.schema import Node, NodeRole, Policy
from recipe.dag.workflow.training_checks import policy_of

READERS = (NodeRole.ROLLOUT, NodeRole.ACTOR, NodeRole.REFERENCE)


def check_overrides(draft: Draft) -> Iterator[Problem]:
    for index, node in draft.each_node():
        at: KeyPath = ("nodes", index, "config")
        if node.config and node.node_role not in READERS:
            yield draft.source.problem(at, f"a {node.node_role} node has no model to configure; remove it", key=True)
    first: dict[tuple[str, str], tuple[Any, KeyPath]] = {}
    for policy, key, value, path in _overrides(draft):
        before, place = first.setdefault((policy, key), (value, path))
        if before != value:
            message = f"policy `{policy}` has one value of `{key}`, but {render_path(place)} says {shown(before)}"
            yield draft.source.problem(path, message, key=True)


def with_overrides(draft: Draft) -> dict[str, Policy]:
    """The policies, each with its nodes' overrides in its `config`, as dotted keys."""
    config: dict[str, dict[str, Any]] = {name: {} for name in draft.policies}
    for policy, key, value, _ in _overrides(draft):
        config[policy][key] = value
    return {name: policy.model_copy(update={"config": config[name]}) for name, policy in draft.policies.items()}


def _overrides(draft: Draft) -> Iterator[tuple[str, str, Any, KeyPath]]:
    """(policy, dotted key, value, place) of every override, the policies' own first."""
    for name, policy in draft.policies.items():
        for key, value, path in _flat(policy.config if policy else {}, ("policies", name, "config")):
            yield name, key, value, path
    for index, node in draft.each_node():
        owner = _owner(draft, index, node)
        for key, value, path in _flat(node.config, ("nodes", index, "config")):
            if owner is not None:
                yield owner, key, value, path


def _owner(draft: Draft, index: int, node: Node) -> str | None:
    if node.node_role not in READERS:
        return None
    if node.node_role is not NodeRole.ROLLOUT:
        return policy_of(draft, index, node)
    agent = draft.agents[node.agent_group] if draft.agents else None
    return agent.policy if agent is not None and agent.policy in draft.policies else None


def _flat(config: dict[str, Any], path: KeyPath, prefix: str = "") -> Iterator[tuple[str, Any, KeyPath]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, (*path, key), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, (*path, key)
