"""siiRL's nodes that are not kept, mainly training nodes: their mistakes are reported before they are left out.

Invariant: a node that passes has siiRL's types; its settings without an effect in siiRL or here are named in a warning.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from recipe.dag.compat.long_form import COMPUTE, OPTIONS, TRAINING, NodeType
from recipe.dag.compat.siirl.episode_nodes import OWN_OPTIONS
from recipe.dag.core.flatten import flatten
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import hint_at
from recipe.dag.workflow.parse_model import parse_piece
from recipe.dag.workflow.source import Source

IDLE_TYPES = ("DATA_LOAD", "BARRIER_SYNC", "ENV_INTERACT", "PUT_TO_BUFFER", "GET_FROM_BUFFER", "CUSTOM")
"""Node types that siiRL declares, but does not run."""
READS_CONFIG = ("ACTOR", "REFERENCE", "CRITIC")
"""Roles whose nodes have a model in siiRL."""


class _Options(BaseModel):
    """The `agent_options` that a training node may need. The others have no effect, so their values are not checked."""

    model_config = ConfigDict(extra="ignore")

    train_cycle: int | None = None
    share_instance: int | None = None


class _Leaving(BaseModel):
    model_config = ConfigDict(extra="ignore")

    node_id: str | None = None
    node_type: NodeType | None = None
    only_forward_compute: bool = False
    agent_group: int = 0
    dependencies: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    agent_options: _Options = _Options()


def without_mistakes(
    source: Source, path: KeyPath, node: dict[str, Any], role: str
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the node without the values that could not be read, and the problems of those values."""
    data = {key: value for key, value in node.items() if value is not None}
    if isinstance(data.get("node_type"), str):
        data["node_type"] = data["node_type"].upper()
    if role == "DEFAULT" and data.get("node_type") in IDLE_TYPES:
        del data["node_type"]
    options = data.get("agent_options")
    if isinstance(options, dict) and options.get("share_instance") is False:  # "not shared" in siiRL
        data["agent_options"] = {key: value for key, value in options.items() if key != "share_instance"}
    piece, problems = parse_piece(_Leaving, data, source, path)
    missing = [key for key in ("node_id", "node_type") if node.get(key) is None]
    problems += [source.problem((*path, key), "missing; this key is required") for key in missing]
    read = piece or _Leaving()
    clean = {key: v for key, v in data.items() if key not in _Leaving.model_fields or key in read.model_fields_set}
    if "agent_options" in clean:
        valid = read.agent_options.model_fields_set
        entries = clean["agent_options"].items()
        clean["agent_options"] = {key: v for key, v in entries if key not in OWN_OPTIONS or key in valid}
    return clean, problems


def warn_of_ignored(node: dict[str, Any], role: str, warn: Any) -> None:
    """Warn of the settings of a node that have no effect."""
    kind, wanted = node.get("node_type"), TRAINING if role in READS_CONFIG else COMPUTE
    if kind is not None and kind != wanted:
        warn(("node_type",), f"{role} nodes are {wanted} nodes; it is read as {wanted}", key=False)
    if node.get("executable_ref") is not None and role != "dynamic sampling":
        warn(("executable_ref",), f"functions of {role} nodes are not called, here as in siiRL")
    if node.get("only_forward_compute") and role not in ("ACTOR", "CRITIC"):
        warn(("only_forward_compute",), f"this has no effect in {role} nodes")
    for key, _, path in flatten(node.get("config", {}), ("config",)) if role not in READS_CONFIG else ():
        hint = "; write it under `algorithm` of the file" if key.startswith("algorithm.") else ""
        warn(path, f"this has no effect in {role} nodes, here as in siiRL{hint}")
    for key, value in node.get("agent_options", {}).items():
        reader = {"train_cycle": "ACTOR", "share_instance": "CRITIC"}.get(key)
        if reader is None:
            hint = "" if key in OPTIONS else hint_at(key, OWN_OPTIONS)
            warn(("agent_options", key), f"this has no effect in {role} nodes{hint}")
        elif value is not None and (reader != role or key == "train_cycle" and node.get("only_forward_compute")):
            hint = "only updates of actors alternate" if key == "train_cycle" else "only critics are shared"
            warn(("agent_options", key), f"this has no effect in {role} nodes; {hint}")
