"""Translation of siiRL's nodes that run in an episode or score it.

Invariant: every option that is left out is named in a warning.
"""

from __future__ import annotations

import re
from typing import Any

from recipe.dag.compat.long_form import COMPUTE, INFERENCE, NODE_FIELDS, OPTIONS, TYPES
from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import find_source, split_ref
from recipe.dag.core.suggestion import hint_at

_TYPE_OF = {"ROLLOUT": INFERENCE, "REWARD": COMPUTE, "DEFAULT": COMPUTE}
OWN_OPTIONS = ("train_cycle", "share_instance")
"""siiRL's `agent_options` for training nodes."""
_ENVS = {"MathEnv": "verl_dag.envs.math_env:MathEnv", "CodeEnv": "verl_dag.envs.code_env:CodeEnv"}
"""Class of an env that siiRL ships -> the env here that takes its place: siiRL's imports siiRL."""
_IMPORTS_SIIRL = re.compile(r"^\s*(?:from|import)\s+siirl\b", re.MULTILINE)
_UNREAD_OPTIONS = ("agent_name", "num_workers", "custom_async_server")


def episode_node(node: dict[str, Any], role: str, kind: str, warn: Any, base: str) -> dict[str, Any]:
    """Return the node in this project's form, without its agent and with siiRL's dependencies. `base`: the workflow
    file, from which files are searched."""
    new = {key: value for key, value in node.items() if key in NODE_FIELDS and value is not None}
    new.pop("config", None)
    new["dependencies"] = node.get("dependencies") or []
    if role in _TYPE_OF and kind in TYPES:
        wanted = new["node_type"] = _TYPE_OF[role]
        if kind != wanted:
            warn(("node_type",), f"{role} nodes are {wanted} nodes; it is read as {wanted}", key=False)
    if role != "ROLLOUT":
        new.pop("agent_group", None)
    if new.pop("only_forward_compute", False):
        warn(("only_forward_compute",), f"this has no effect in {role} nodes")
    _translate_function(new, role, warn)
    if role in ("REWARD", "DEFAULT"):
        for key in ("config", "agent_options"):
            if node.get(key):
                warn((key,), f"this has no effect in {role} nodes")
        new.pop("agent_options", None)
    elif isinstance(new.get("agent_options"), dict):
        new["agent_options"] = _options(new["agent_options"], warn, base)
    return new


def _translate_function(new: dict[str, Any], role: str, warn: Any) -> None:
    """Write `module.function` of a node as `module:function`, and remove it from rollout nodes."""
    if role == "ROLLOUT" and "executable_ref" in new:
        warn(("executable_ref",), "functions of ROLLOUT nodes are not called, here as in siiRL")
        del new["executable_ref"]
    elif isinstance(ref := new.get("executable_ref"), str) and ":" not in ref and not ref.endswith(".py"):
        new["executable_ref"] = ":".join(ref.rsplit(".", 1))


def _options(data: dict[str, Any], warn: Any, base: str) -> dict[str, Any]:
    """Return the `agent_options` of a rollout node that have an effect, and warn of the others."""
    options = {key: value for key, value in data.items() if key in OPTIONS and value is not None}
    for key in data:
        if key in OWN_OPTIONS and data[key] is not None:
            reader = "the ACTOR node's" if key == "train_cycle" else "the CRITIC node's"
            warn(("agent_options", key), f"this has no effect in ROLLOUT nodes; {reader} applies")
        elif key in _UNREAD_OPTIONS:
            warn(("agent_options", key), "this has no effect; it belongs to siiRL's single-agent loop")
        elif key not in OPTIONS and key not in OWN_OPTIONS:
            hint = hint_at(key, [*OPTIONS, *OWN_OPTIONS])
            warn(("agent_options", key), f"unknown key, which has no effect{hint}")
    paths = options.get("env_path")
    if isinstance(paths, list) and not paths:
        del options["env_path"]
    elif isinstance(paths, list) and len(paths) > 1 and "env_route" not in options:
        message = "only the first env is used, as in siiRL; to select one per sample, set `env_route`"
        warn(("agent_options", "env_path", 1), message, key=False)
        options["env_path"] = paths[:1]
    if isinstance(options.get("env_path"), list):
        options["env_path"] = [_env(entry, index, warn, base) for index, entry in enumerate(options["env_path"])]
    return options


def _env(entry: Any, index: int, warn: Any, base: str) -> Any:
    """Return the env here that takes the place of one of siiRL's own, or the entry."""
    _, name = split_ref(entry) if isinstance(entry, str) else ("", None)
    if name not in _ENVS:
        return entry
    try:
        if not _IMPORTS_SIIRL.search(find_source(entry, base).read_text(encoding="utf-8", errors="replace")):
            return entry
    except UserError:  # siiRL's package is not here either
        pass
    warn(("agent_options", "env_path", index), f"siiRL's {name} needs siiRL; {_ENVS[name]} takes its place", key=False)
    return _ENVS[name]
