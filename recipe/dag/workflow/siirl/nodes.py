"""siiRL's nodes, sorted: what runs in an episode or scores it, what trains, and what stands for an option.

Invariant: every node of the file is in one of the three, or a warning says why nothing runs for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipe.dag.workflow.problem import KeyPath, closest
from recipe.dag.workflow.schema import AgentOptions, Node, NodeRole, NodeType
from recipe.dag.workflow.source import Source

IDLE_TYPES = ("DATA_LOAD", "BARRIER_SYNC", "ENV_INTERACT", "PUT_TO_BUFFER", "GET_FROM_BUFFER", "CUSTOM")
"""Declared by siiRL, run by nothing in it."""
SAMPLING_ROLES = ("DYNAMIC_SAMPLING", "POSTPROCESS_SAMPLING")
TRAINING_ROLES = ("ADVANTAGE", "ACTOR", "CRITIC", "REFERENCE")
_TYPES = {"ROLLOUT": NodeType.MODEL_INFERENCE, "REWARD": NodeType.COMPUTE, "DEFAULT": NodeType.COMPUTE}
_OWN_OPTIONS = ("train_cycle", "share_instance")
_UNREAD_OPTIONS = ("agent_name", "num_workers", "custom_async_server")


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
    return group if isinstance(group, int) else 0


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
        _sort(nodes, index, node, warn)
    nodes.groups = sorted({group_of(nodes.raw[i]) for i in nodes.kept if role_of(nodes.raw[i]) == "ROLLOUT"})
    for index in nodes.kept:
        if role_of(nodes.raw[index]) == "ROLLOUT" and isinstance(nodes.raw[index].get("agent_group", 0), int):
            nodes.kept[index]["agent_group"] = nodes.groups.index(group_of(nodes.raw[index]))
    if nodes.groups and nodes.groups != list(range(len(nodes.groups))):
        first = nodes.rollouts(nodes.groups[-1])[0]
        message = f"the agent groups are {nodes.groups}; here they count from 0 without gaps"
        result.warnings.append(source.problem(("nodes", first, "agent_group"), message))
    return nodes


def _sort(nodes: Nodes, index: int, node: dict[str, Any], warn: Any) -> None:
    role, kind = role_of(node), str(node.get("node_type", "")).upper()
    if kind in IDLE_TYPES:
        warn(("node_type",), f"nothing runs for {kind} nodes, there as here; it is left out", key=False)
    elif role == "DATA_REBALANCE":
        warn(("node_role",), "rows are balanced without a node for it; it is left out", key=False)
    elif role in SAMPLING_ROLES or role == "DEFAULT" and _samples(node):
        nodes.sampling.append(index)
    elif role in TRAINING_ROLES:
        nodes.training[index] = role
        _warn_of_unread(node, role, warn)
    elif role == "DEFAULT" and kind == "COMPUTE" and ".py:" not in str(node.get("executable_ref", "")):
        given = node.get("executable_ref")
        what = f"`{given}` works on siiRL's batch" if given else "it has no function"
        warn(("node_id",), f"{what}; the node is left out (here: `executable_ref: file.py:function`)", key=False)
    else:
        nodes.kept[index] = _kept(node, role, kind, warn)


def _samples(node: dict[str, Any]) -> bool:
    """siiRL's DAPO filter, a function over the batch; one of its pipelines misspells it."""
    name = str(node.get("executable_ref", "")).replace(":", ".").rpartition(".")[2]
    return name in ("dynamic_sampling", "dynaminc_sampling")


def _warn_of_unread(node: dict[str, Any], role: str, warn: Any) -> None:
    if node.get("executable_ref") is not None:
        warn(("executable_ref",), f"nothing calls a function of {role} nodes, there as here")
    for key, value in options_of(node).items():
        reader = {"train_cycle": "ACTOR", "share_instance": "CRITIC"}.get(key)
        if reader is None:
            warn(("agent_options", key), f"nothing reads this of {role} nodes")
        elif value is not None and (reader != role or key == "train_cycle" and node.get("only_forward_compute")):
            hint = "the actor's update alone takes turns" if key == "train_cycle" else "only critics are shared"
            warn(("agent_options", key), f"nothing reads this of {role} nodes; {hint}")


def _kept(node: dict[str, Any], role: str, kind: str, warn: Any) -> dict[str, Any]:
    """The node in this language, but for its agent and dependencies."""
    new = {key: value for key, value in node.items() if key in Node.model_fields and value is not None}
    new.pop("config", None)
    new["dependencies"] = node.get("dependencies") or []
    if role in _TYPES and kind in tuple(NodeType):
        if kind != _TYPES[role]:
            warn(("node_type",), f"a {role} node is a {_TYPES[role]} node; it is read as one", key=False)
        new["node_type"] = str(_TYPES[role])
    if role != "ROLLOUT":
        new.pop("agent_group", None)
    if new.pop("only_forward_compute", False):
        warn(("only_forward_compute",), f"nothing reads this of {role} nodes")
    if role == "ROLLOUT" and "executable_ref" in new:
        warn(("executable_ref",), "nothing calls a function of ROLLOUT nodes, there as here")
        del new["executable_ref"]
    elif isinstance(ref := new.get("executable_ref"), str) and ":" not in ref and not ref.endswith(".py"):
        new["executable_ref"] = ":".join(ref.rsplit(".", 1))
    if role in (NodeRole.REWARD, NodeRole.DEFAULT):
        for key in ("config", "agent_options"):
            if node.get(key):
                warn((key,), f"nothing reads this of {role} nodes")
        new.pop("agent_options", None)
    elif isinstance(new.get("agent_options"), dict):
        new["agent_options"] = _options(new["agent_options"], warn)
    return new


def _options(given: dict[str, Any], warn: Any) -> dict[str, Any]:
    """`agent_options` of a rollout node."""
    options = {key: value for key, value in given.items() if key in AgentOptions.model_fields and value is not None}
    for key in given:
        if key in _OWN_OPTIONS and given[key] is not None:
            whose = "the ACTOR node's" if key == "train_cycle" else "the CRITIC node's"
            warn(("agent_options", key), f"nothing reads this of ROLLOUT nodes; {whose} counts")
        elif key in _UNREAD_OPTIONS:
            warn(("agent_options", key), "nothing reads this; it belongs to siiRL's single-agent loop")
        elif key not in AgentOptions.model_fields and key not in _OWN_OPTIONS:
            near = closest(key, AgentOptions.model_fields)
            message = "unknown key, nothing reads it" + (f"; did you mean `{near}`?" if near else "")
            warn(("agent_options", key), message)
    paths = options.get("env_path")
    if isinstance(paths, list) and not paths:
        del options["env_path"]
    elif isinstance(paths, list) and len(paths) > 1 and "env_route" not in options:
        warn(("agent_options", "env_path", 1), "only the first env is used, as there; `env_route` chooses", key=False)
        options["env_path"] = paths[:1]
    return options
