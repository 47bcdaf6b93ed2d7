"""siiRL's nodes that stay no nodes here, those that train above all: their mistakes are told before they go.

Invariant: what passes has siiRL's types; what siiRL or this engine does not read of it is named in a warning.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from recipe.dag.workflow.dotted import flat
from recipe.dag.workflow.pieces import parse_piece
from recipe.dag.workflow.problem import KeyPath, Problem, closest
from recipe.dag.workflow.schema import AgentOptions, NodeType
from recipe.dag.workflow.siirl.kept import OWN_OPTIONS
from recipe.dag.workflow.source import Source

IDLE_TYPES = ("DATA_LOAD", "BARRIER_SYNC", "ENV_INTERACT", "PUT_TO_BUFFER", "GET_FROM_BUFFER", "CUSTOM")
"""Declared by siiRL, run by nothing in it."""
READS_CONFIG = ("ACTOR", "REFERENCE", "CRITIC")
"""Roles that siiRL gives a model."""


class _Options(BaseModel):
    """Of `agent_options`, what a training node may need; of the others is only said that nothing reads them."""

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
    """The node without what could not be read, and what is wrong with that."""
    given = {key: value for key, value in node.items() if value is not None}
    if isinstance(given.get("node_type"), str):
        given["node_type"] = given["node_type"].upper()
    if role == "DEFAULT" and given.get("node_type") in IDLE_TYPES:
        del given["node_type"]
    options = given.get("agent_options")
    if isinstance(options, dict) and options.get("share_instance") is False:  # siiRL's word for "not shared"
        given["agent_options"] = {key: value for key, value in options.items() if key != "share_instance"}
    piece, problems = parse_piece(_Leaving, given, source, path)
    missing = [key for key in ("node_id", "node_type") if node.get(key) is None]
    problems += [source.problem((*path, key), "missing; this key is required") for key in missing]
    read = piece or _Leaving()
    clean = {key: v for key, v in given.items() if key not in _Leaving.model_fields or key in read.model_fields_set}
    if "agent_options" in clean:
        known = read.agent_options.model_fields_set
        entries = clean["agent_options"].items()
        clean["agent_options"] = {key: v for key, v in entries if key not in OWN_OPTIONS or key in known}
    return clean, problems


def warn_of_unread(node: dict[str, Any], role: str, warn: Any) -> None:
    kind, wanted = node.get("node_type"), NodeType.MODEL_TRAIN if role in READS_CONFIG else NodeType.COMPUTE
    if kind is not None and kind != wanted:
        warn(("node_type",), f"{role} nodes are {wanted} nodes; it is read as one", key=False)
    if node.get("executable_ref") is not None and role != "dynamic sampling":
        warn(("executable_ref",), f"nothing calls a function of {role} nodes, there as here")
    if node.get("only_forward_compute") and role not in ("ACTOR", "CRITIC"):
        warn(("only_forward_compute",), f"nothing reads this of {role} nodes")
    for key, _, at in flat(node.get("config", {}), ("config",)) if role not in READS_CONFIG else ():
        hint = "; write it under `algorithm` of the file" if key.startswith("algorithm.") else ""
        warn(at, f"nothing reads this of {role} nodes, there as here{hint}")
    for key, value in node.get("agent_options", {}).items():
        reader = {"train_cycle": "ACTOR", "share_instance": "CRITIC"}.get(key)
        if reader is None:
            near = None if key in AgentOptions.model_fields else closest(key, OWN_OPTIONS)
            hint = f"; did you mean `{near}`?" if near else ""
            warn(("agent_options", key), f"nothing reads this of {role} nodes{hint}")
        elif value is not None and (reader != role or key == "train_cycle" and node.get("only_forward_compute")):
            hint = "the actor's update alone takes turns" if key == "train_cycle" else "only critics are shared"
            warn(("agent_options", key), f"nothing reads this of {role} nodes; {hint}")
