"""The short form of a node, turned into the long one: `{id: check, agent: verifier, after: solve, hooks: hooks.py}`.

Invariant: the result is a file in the long form whose parts know where they are written, so that a mistake is reported
under the key that the user typed. A file without short keys is returned as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipe.dag.core.problem import KeyPath
from recipe.dag.workflow.node_kinds import KINDS, NodeRole
from recipe.dag.workflow.source import Origin, Source

LONG: Mapping[str, tuple[str, ...]] = {
    "id": ("node_id",),
    "after": ("dependencies",),
    "reward": ("executable_ref",),
    "compute": ("executable_ref",),
    "args": ("executable_kwargs",),
    "hooks": ("agent_options", "process_path"),
    "prompt_options": ("agent_options", "pre_process_kwargs"),
    "parse_options": ("agent_options", "post_process_kwargs"),
    "env": ("agent_options", "env_path"),
    "env_route": ("agent_options", "env_route"),
    "sees_env": ("agent_options", "obs_with_env"),
    "env_pays": ("agent_options", "rewards_with_env"),
}
"""Short key -> its path in the long form."""
ROLES = {kind.key: str(role) for role, kind in KINDS.items() if kind.key is not None}
"""Short key that determines the kind of a node -> the node's role."""
KEYS = tuple(dict.fromkeys((*ROLES, *LONG)))
"""All short keys."""


def in_long_form(source: Source) -> Source:
    """Return the source with every node in the long form, or the source itself if all nodes are."""
    nodes = source.data.get("nodes")
    if not isinstance(nodes, list) or not any(map(is_short, nodes)):
        return source
    result = Source(source.file, dict(source.data), problems=source.problems, warnings=source.warnings)
    result.unread |= source.unread
    result.origins[()] = Origin(source, ())
    result.data["nodes"] = list(nodes)
    for index, node in enumerate(nodes):
        if is_short(node):
            path: KeyPath = ("nodes", index)
            source.problems += [source.problem((*path, key), text, key=True) for key, text in contradictions(node)]
            result.data["nodes"][index], moved = long_node(node)
            for long_path, key in moved.items():
                result.origins[(*path, *long_path)] = Origin(source, (*path, key))
                if len(long_path) == 2 and long_path[0] not in node:
                    # a mistake of all `agent_options` is reported under the first key that moved there
                    result.origins.setdefault((*path, long_path[0]), Origin(source, (*path, key)))
    return result


def shorter(source: Source) -> str | None:
    """Return a hint at the short form if the file's nodes are written in the long form, or None."""
    nodes = source.data.get("nodes") or []
    long = [node for node in nodes if isinstance(node, dict) and node.get("node_type") not in (None, "MODEL_TRAIN")]
    if not long or all(node.get("node_role") == "ADVANTAGE" for node in long):
        return None
    return "hint: nodes have a shorter form, `{id: ..., agent: ..., after: ...}` (docs/workflows.md, `verl-dag import`)"


def is_short(node: Any) -> bool:
    """Return whether a node has a key of the short form, or lacks a `node_type`."""
    return isinstance(node, dict) and (bool(LONG.keys() & node.keys()) or "node_type" not in node)


def long_node(node: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str | int, ...], str]]:
    """Return (the node in the long form, path in it -> the short key whose value is there)."""
    kinds, moved = _kinds(node), dict[tuple[str | int, ...], str]()
    long = {key: value for key, value in node.items() if key not in (*LONG, *kinds[1:])}
    if kinds and not KINDS[NodeRole(ROLES[kinds[0]])].keeps_value and not long[kinds[0]]:
        del long[kinds[0]]
    if isinstance(long.get("agent_options"), dict):
        long["agent_options"] = dict(long["agent_options"])
    for key in LONG.keys() & node.keys() - set(kinds[1:]):
        _put(long, key, node[key], moved)
    if "workflow" not in node:  # a sub-workflow has no role
        role = node.get("node_role", ROLES[kinds[0]] if kinds else "DEFAULT")
        long.setdefault("node_type", _type_of(role))
        long.setdefault("node_role", role)
    return long, moved


def contradictions(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, error message) for each setting that a node has twice, and each kind beyond the first."""
    kinds = _kinds(node)
    for key in kinds[1:]:
        yield key, f"a node has one kind, but `{kinds[0]}` and `{key}` give it two; write two nodes"
    for key in LONG.keys() & node.keys() - set(kinds[1:]):
        *parents, last = LONG[key]
        holder: Any = node
        for parent in parents:
            holder = holder.get(parent)
        if isinstance(holder, dict) and last in holder:
            yield key, f"this sets the same as `{'.'.join(LONG[key])}`; remove one of them"


def _type_of(role: Any) -> str:
    exists = isinstance(role, str) and role.upper() in tuple(NodeRole)
    return str(KINDS[NodeRole(role.upper())].type) if exists else "COMPUTE"


def _kinds(node: Mapping[str, Any]) -> list[str]:
    """Return the keys that determine the node's kind. With `node_role`, the keys that are not short keys do not count:
    a training node names an agent, too."""
    return [key for key in node if key in ROLES and ("node_role" not in node or key in LONG)]


def _put(long: dict[str, Any], key: str, value: Any, moved: dict[tuple[str | int, ...], str]) -> None:
    """Move the value of a short key to its path in the long form, and record that in `moved`."""
    *parents, last = LONG[key]
    holder = long
    for parent in parents:
        holder = holder.setdefault(parent, {})
    if not isinstance(holder, dict) or last in holder:
        return  # set twice, or `agent_options` is not a mapping: reported elsewhere
    is_scalar = key == "after" and isinstance(value, str)
    holder[last] = [value] if is_scalar else value
    moved[LONG[key]] = key
    if is_scalar:
        moved[(*LONG[key], 0)] = key
