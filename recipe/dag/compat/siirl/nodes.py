"""siiRL's nodes, sorted into episode and reward nodes, training nodes, and nodes that represent an option.

Invariant: every node of the file is in one of the three groups, or a warning gives the reason why it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipe.dag.compat.long_form import NODE_FIELDS
from recipe.dag.compat.siirl.episode_nodes import episode_node
from recipe.dag.compat.siirl.training import IDLE_TYPES, warn_of_ignored, without_mistakes
from recipe.dag.core.problem import KeyPath
from recipe.dag.core.suggestion import hint_at
from recipe.dag.workflow.source import Source

SAMPLING_ROLES = ("DYNAMIC_SAMPLING", "POSTPROCESS_SAMPLING")
TRAINING_ROLES = ("ADVANTAGE", "ACTOR", "CRITIC", "REFERENCE")


@dataclass(slots=True)
class Nodes:
    """The nodes of a file, by index."""

    raw: dict[int, dict[str, Any]] = field(default_factory=dict)
    """All nodes that are mappings, as written."""
    kept: dict[int, Any] = field(default_factory=dict)
    """Episode and reward nodes, translated."""
    training: dict[int, str] = field(default_factory=dict)
    """Training nodes -> role."""
    sampling: list[int] = field(default_factory=list)
    """Nodes of dynamic sampling."""
    places: dict[int, int] = field(default_factory=dict)
    """Kept nodes -> index in the result."""
    groups: list[int] = field(default_factory=list)
    """The agent groups with a rollout node, in order: their index in this list is the agent's."""

    env_rewards: bool = True
    """False if a node's config turns the env's rewards off."""
    kl_loss: KeyPath | None = None
    """Path of the setting that turns the KL loss on."""
    sound: bool = True
    """True if every node that is not kept could be read completely."""

    def of_group(self, group: int, *roles: str) -> list[int]:
        """Return the training nodes of an agent group that have one of these roles."""
        indices = [index for index, role in self.training.items() if role in roles]
        return [index for index in indices if group_of(self.raw[index]) == group]

    def rollouts(self, group: int) -> list[int]:
        """Return the rollout nodes of an agent group."""
        indices = [index for index in self.kept if index in self.raw and role_of(self.raw[index]) == "ROLLOUT"]
        return [index for index in indices if group_of(self.raw[index]) == group]


def role_of(node: dict[str, Any]) -> str:
    return str(node.get("node_role") or "DEFAULT").upper()


def group_of(node: dict[str, Any]) -> int:
    group = node.get("agent_group", 0)
    return group if type(group) is int else 0  # not isinstance, as true is not 1


def options_of(node: dict[str, Any]) -> dict[str, Any]:
    options = node.get("agent_options")
    return options if isinstance(options, dict) else {}


def read_nodes(source: Source, result: Source) -> Nodes:
    """Read and sort the nodes of a file; problems and warnings are added to `result`."""
    nodes = Nodes()
    for index, node in enumerate(source.data["nodes"]):
        _read_node(source, result, nodes, index, node)
    nodes.groups = sorted({group_of(nodes.raw[i]) for i in nodes.kept if role_of(nodes.raw[i]) == "ROLLOUT"})
    for index in nodes.kept:
        if role_of(nodes.raw[index]) == "ROLLOUT" and type(nodes.raw[index].get("agent_group", 0)) is int:
            nodes.kept[index]["agent_group"] = nodes.groups.index(group_of(nodes.raw[index]))
    if nodes.groups and nodes.groups != list(range(len(nodes.groups))):
        first = nodes.rollouts(nodes.groups[-1])[0]
        message = f"the agent groups are {nodes.groups}; here they are renumbered from 0 without gaps"
        result.warnings.append(source.problem(("nodes", first, "agent_group"), message))
    return nodes


def _read_node(source: Source, result: Source, nodes: Nodes, index: int, node: Any) -> None:
    """Sort one node, and warn of its keys that have no effect."""
    path: KeyPath = ("nodes", index)

    def warn(at: KeyPath, message: str, *, key: bool = True) -> None:
        result.warnings.append(source.problem((*path, *at), message, key=key))

    if not isinstance(node, dict):
        warn((), "this is not a mapping, so it is left out", key=False)
        return
    nodes.raw[index] = node
    for key in node:
        if key not in NODE_FIELDS and key not in ("filter_plugin", "retry_limit"):
            warn((key,), f"unknown key, which has no effect{hint_at(key, NODE_FIELDS)}")
    if node.get("filter_plugin") is not None:
        message = "nodes have no filters, so this has no effect (`algorithm.drop_zero_variance: true` drops groups)"
        warn(("filter_plugin",), message)
    _sort(nodes, index, warn, source.file)
    if index not in nodes.kept:
        nodes.raw[index], problems = without_mistakes(source, path, node, role_of(node))
        result.problems += problems
        nodes.sound = nodes.sound and not problems
    if index in nodes.training or index in nodes.sampling:
        role = "dynamic sampling" if role_of(node) == "DEFAULT" else role_of(node)
        warn_of_ignored(nodes.raw[index], role, warn)


def _sort(nodes: Nodes, index: int, warn: Any, base: str) -> None:
    """Put a node into the group to which it belongs, or warn that it is left out."""
    node = nodes.raw[index]
    role, kind = role_of(node), str(node.get("node_type", "")).upper()
    if role in SAMPLING_ROLES or role == "DEFAULT" and _samples(node):
        nodes.sampling.append(index)
    elif role in TRAINING_ROLES:
        nodes.training[index] = role
    elif role == "DATA_REBALANCE":
        warn(("node_role",), "rows are balanced without a node, so it is left out", key=False)
    elif kind in IDLE_TYPES and role == "DEFAULT":
        warn(("node_type",), f"{kind} nodes run nothing, here as in siiRL; it is left out", key=False)
    elif role == "DEFAULT" and kind == "COMPUTE" and ".py:" not in str(node.get("executable_ref", "")):
        function = node.get("executable_ref")
        reason = f"`{function}` works on siiRL's batch" if function else "it has no function"
        warn(("node_id",), f"{reason}; the node is left out (here: `executable_ref: file.py:function`)", key=False)
    else:
        nodes.kept[index] = episode_node(node, role, kind, warn, base)


def _samples(node: dict[str, Any]) -> bool:
    """Return whether the node runs siiRL's DAPO filter, whose name one of its pipelines misspells."""
    name = str(node.get("executable_ref", "")).replace(":", ".").rpartition(".")[2]
    return name in ("dynamic_sampling", "dynaminc_sampling")
