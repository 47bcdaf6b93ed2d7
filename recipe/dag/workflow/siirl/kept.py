"""A siiRL node that runs in an episode or scores it, in this language.

Invariant: what is left out of it is named in a warning.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.workflow.problem import closest
from recipe.dag.workflow.schema import AgentOptions, Node, NodeRole, NodeType

TYPES = {"ROLLOUT": NodeType.MODEL_INFERENCE, "REWARD": NodeType.COMPUTE, "DEFAULT": NodeType.COMPUTE}
OWN_OPTIONS = ("train_cycle", "share_instance")
"""siiRL's `agent_options` of training nodes."""
_UNREAD_OPTIONS = ("agent_name", "num_workers", "custom_async_server")


def in_this_language(node: dict[str, Any], role: str, kind: str, warn: Any) -> dict[str, Any]:
    """The node in this language, but for its agent and dependencies."""
    new = {key: value for key, value in node.items() if key in Node.model_fields and value is not None}
    new.pop("config", None)
    new["dependencies"] = node.get("dependencies") or []
    if role in TYPES and kind in tuple(NodeType):
        if kind != TYPES[role]:
            warn(("node_type",), f"{role} nodes are {TYPES[role]} nodes; it is read as one", key=False)
        new["node_type"] = str(TYPES[role])
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
        if key in OWN_OPTIONS and given[key] is not None:
            whose = "the ACTOR node's" if key == "train_cycle" else "the CRITIC node's"
            warn(("agent_options", key), f"nothing reads this of ROLLOUT nodes; {whose} counts")
        elif key in _UNREAD_OPTIONS:
            warn(("agent_options", key), "nothing reads this; it belongs to siiRL's single-agent loop")
        elif key not in AgentOptions.model_fields and key not in OWN_OPTIONS:
            near = closest(key, [*AgentOptions.model_fields, *OWN_OPTIONS])
            message = "unknown key, nothing reads it" + (f"; did you mean `{near}`?" if near else "")
            warn(("agent_options", key), message)
    paths = options.get("env_path")
    if isinstance(paths, list) and not paths:
        del options["env_path"]
    elif isinstance(paths, list) and len(paths) > 1 and "env_route" not in options:
        warn(("agent_options", "env_path", 1), "only the first env is used, as there; `env_route` chooses", key=False)
        options["env_path"] = paths[:1]
    return options
