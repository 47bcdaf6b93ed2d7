"""Overrides of verl's `actor_rollout_ref` and `critic`: the `config` of a policy, of its critic, and of nodes, which is
merged into that of their policy.

Invariant: a key has one value per policy. Conflicting values of nodes or of a node and its policy are an error, and so
is a key that the workflow sets elsewhere or that has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from recipe.dag.core.flatten import flatten
from recipe.dag.core.problem import KeyPath, Problem, render_path
from recipe.dag.workflow.agent_schema import Policy
from recipe.dag.workflow.checks.training import policy_of
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.node import CRITIC_KINDS, KINDS, Kind, Node
from recipe.dag.workflow.parse_model import show_value
from recipe.dag.workflow.verl_keys import rows_key, why_not

OWN_OF_CRITICS = ("optim.", "loss_", "ppo_", "use_dynamic_bsz")
"""Beginnings of the keys that the critic of an adapter has itself; its base's trainer has the others."""


def check_overrides(draft: Draft) -> Iterator[Problem]:
    values: dict[tuple[str, bool, str], tuple[Any, KeyPath]] = {}
    for policy, critic, key, value, path in _overrides(draft):
        adapter = draft.policies[policy]
        if adapter is not None and adapter.lora is not None and not (critic and key.startswith(OWN_OF_CRITICS)):
            message = f"policy `{policy}` is an adapter; set this in `policies.{adapter.lora.base}.config`"
            yield draft.source.problem(path, message, key=True)
            continue
        if (message := why_not(key, critic=critic, policy=policy)) is not None:
            yield draft.source.problem(path, message, key=True)
            continue
        first_value, first_path = values.setdefault((policy, critic, key), (value, path))
        if first_value != value:
            where = render_path(draft.source.origin(first_path).path)
            message = (
                f"policy `{policy}` has one value of `{key}`, but {where} is {show_value(first_value)}; remove one"
            )
            yield draft.source.problem(path, message, key=True)
    for (policy, critic, key), (value, path) in values.items():
        rows, dynamic = rows_key(critic)
        if key == rows and value is not None and values.get((policy, critic, dynamic), (False, ()))[0] is True:
            message = f"this has no effect with `{dynamic}: true`, which forms micro-batches by tokens; remove one"
            yield draft.source.problem(path, message, key=True)


def with_overrides(draft: Draft) -> dict[str, Policy]:
    """Return the policies, with the overrides of their nodes in their `config` and in their critic's, as dotted keys.

    A number of rows per micro-batch turns the division by tokens off, unless that is set, too.
    """
    config: dict[tuple[str, bool], dict[str, Any]] = {}
    for policy, critic, key, value, _ in _overrides(draft):
        config.setdefault((policy, critic), {})[key] = value
    for (_, critic), values in config.items():
        rows, dynamic = rows_key(critic)
        if values.get(rows) is not None:
            values.setdefault(dynamic, False)
    result = {}
    for name, policy in draft.each_policy():
        critic = policy.critic and policy.critic.model_copy(update={"config": config.get((name, True), {})})
        result[name] = policy.model_copy(update={"config": config.get((name, False), {}), "critic": critic})
    return result


@dataclass(frozen=True, slots=True)
class Override:
    """A key of verl's configuration that a workflow sets, with its position."""

    branch: str
    """`actor_rollout_ref` or `critic`."""
    key: str
    """The dotted key below the branch."""
    value: Any
    place: Problem
    """The position, as a problem without a message."""

    def problem(self, message: str) -> Problem:
        return replace(self.place, message=message)


def placed_overrides(draft: Draft) -> Iterator[Override]:
    """Yield every override with its position."""
    for _, critic, key, value, path in _overrides(draft):
        branch = "critic" if critic else "actor_rollout_ref"
        yield Override(branch, key, value, draft.source.problem(path, "", key=True))


def _overrides(draft: Draft) -> Iterator[tuple[str, bool, str, Any, KeyPath]]:
    """Yield (policy, whether for the critic, dotted key, value, path) of every override, the policies' own first."""
    for name, policy in draft.each_policy():
        if policy.api is not None:
            continue  # its `config` is an error as a whole
        for key, value, path in flatten(policy.config, ("policies", name, "config")):
            yield name, False, key, value, path
        critic = policy.critic.config if policy.critic else {}
        for key, value, path in flatten(critic, ("policies", name, "critic", "config")):
            yield name, True, key, value, path
    for index, node in draft.each_node():
        owner = _owner(draft, node)
        for key, value, path in flatten(node.config, ("nodes", index, "config")):
            if owner is not None:
                yield owner, node.kind in CRITIC_KINDS, key, value, path


def _owner(draft: Draft, node: Node) -> str | None:
    """Return the policy to which the overrides of a node belong, or None."""
    if "config" not in KINDS[node.kind].reads:
        return None
    if node.kind is not Kind.ROLLOUT:
        return policy_of(draft, node)
    agent = draft.agent_of(node)
    return agent.policy if agent is not None and agent.policy in draft.policies else None
