"""siiRL's nodes, sorted: what runs in an episode or scores it, what trains, and what stands for an option.

Invariant: every node of the file is in one of the three, or a warning says why nothing runs for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipe.dag.workflow.problem import KeyPath, closest
from recipe.dag.workflow.schema import Node
from recipe.dag.workflow.siirl.kept import in_this_language
from recipe.dag.workflow.siirl.training import IDLE_TYPES, warn_of_unread, without_mistakes
from recipe.dag.workflow.source import Source

SAMPLING_ROLES = ("DYNAMIC_SAMPLING", "POSTPROCESS_SAMPLING")
TRAINING_ROLES = ("ADVANTAGE", "ACTOR", "CRITIC", "REFERENCE")


@dataclass(slots=True)
class Nodes:
    """By place in the file."""

    raw: dict[int, dict[str, Any]] = field(default_factory=dict)
    """All that are mappings, as written."""
    kept: dict[int, Any] = field(default_factory=dict)
    training: dict[int, str] = field(default_factory=dict)
    """-> role"""
    sampling: list[int] = field(default_factory=list)
    """Dynamic sampling."""
    places: dict[int, int] = field(default_factory=dict)
    """Kept node -> its place in the result."""
    groups: list[int] = field(default_factory=list)
    """The agent groups that generate, in order: their index here is the agent's."""

    env_rewards: bool = True
    """False where a node's config says so."""
    kl_loss: KeyPath | None = None
    """Where a node's config asks for a KL loss."""
    sound: bool = True
    """Every node that is not kept could be read whole."""

    def of_group(self, group: int, *roles: str) -> list[int]:
        """Training nodes."""
        found = [index for index, role in self.training.items() if role in roles]
        return [index for index in found if group_of(self.raw[index]) == group]

    def rollouts(self, group: int) -> list[int]:
        found = [index for index in self.kept if index in self.raw and role_of(self.raw[index]) == "ROLLOUT"]
        return [index for index in found if group_of(self.raw[index]) == group]


def role_of(node: dict[str, Any]) -> str:
    return str(node.get("node_role") or "DEFAULT").upper()


def group_of(node: dict[str, Any]) -> int:
    group = node.get("agent_group", 0)
    return group if type(group) is int else 0  # true is no 1


def options_of(node: dict[str, Any]) -> dict[str, Any]:
    options = node.get("agent_options")
    return options if isinstance(options, dict) else {}


def read_nodes(source: Source, result: Source) -> Nodes:
    nodes = Nodes()
    for index, node in enumerate(source.data["nodes"]):
        path: KeyPath = ("nodes", index)

        def warn(at: KeyPath, message: str, *, key: bool = True, path: KeyPath = path) -> None:
            result.warnings.append(source.problem((*path, *at), message, key=key))

        if not isinstance(node, dict):
            warn((), "this is no mapping, so it is left out", key=False)
            continue
        nodes.raw[index] = node
        for key in node:
            if key not in Node.model_fields and key not in ("filter_plugin", "retry_limit"):
                near = closest(key, Node.model_fields)
                warn((key,), "unknown key, nothing reads it" + (f"; did you mean `{near}`?" if near else ""))
        if node.get("filter_plugin") is not None:
            warn(("filter_plugin",), "nodes have no filters, nothing calls it (`algorithm.drop_zero_variance` may do)")
        _sort(nodes, index, warn)
        if index not in nodes.kept:
            nodes.raw[index], problems = without_mistakes(source, path, node, role_of(node))
            result.problems += problems
            nodes.sound = nodes.sound and not problems
        if index in nodes.training or index in nodes.sampling:
            what = "dynamic sampling" if role_of(node) == "DEFAULT" else role_of(node)
            warn_of_unread(nodes.raw[index], what, warn)
    nodes.groups = sorted({group_of(nodes.raw[i]) for i in nodes.kept if role_of(nodes.raw[i]) == "ROLLOUT"})
    for index in nodes.kept:
        if role_of(nodes.raw[index]) == "ROLLOUT" and type(nodes.raw[index].get("agent_group", 0)) is int:
            nodes.kept[index]["agent_group"] = nodes.groups.index(group_of(nodes.raw[index]))
    if nodes.groups and nodes.groups != list(range(len(nodes.groups))):
        first = nodes.rollouts(nodes.groups[-1])[0]
        message = f"the agent groups are {nodes.groups}; here they count from 0 without gaps"
        result.warnings.append(source.problem(("nodes", first, "agent_group"), message))
    return nodes


def _sort(nodes: Nodes, index: int, warn: Any) -> None:
    node = nodes.raw[index]
    role, kind = role_of(node), str(node.get("node_type", "")).upper()
    if role in SAMPLING_ROLES or role == "DEFAULT" and _samples(node):
        nodes.sampling.append(index)
    elif role in TRAINING_ROLES:
        nodes.training[index] = role
    elif role == "DATA_REBALANCE":
        warn(("node_role",), "rows are balanced without a node for it; it is left out", key=False)
    elif kind in IDLE_TYPES and role == "DEFAULT":
        warn(("node_type",), f"nothing runs for {kind} nodes, there as here; it is left out", key=False)
    elif role == "DEFAULT" and kind == "COMPUTE" and ".py:" not in str(node.get("executable_ref", "")):
        given = node.get("executable_ref")
        what = f"`{given}` works on siiRL's batch" if given else "it has no function"
        warn(("node_id",), f"{what}; the node is left out (here: `executable_ref: file.py:function`)", key=False)
    else:
        nodes.kept[index] = in_this_language(node, role, kind, warn)


def _samples(node: dict[str, Any]) -> bool:
    """siiRL's DAPO filter, a function over the batch; one of its pipelines misspells it."""
    name = str(node.get("executable_ref", "")).replace(":", ".").rpartition(".")[2]
    return name in ("dynamic_sampling", "dynaminc_sampling")
