"""The short form of a node, turned into the long one: `{id: check, agent: verifier, after: solve, hooks: hooks.py}`.

Invariant: what comes out is a file in the long form, each part of which knows where it is written, so that a mistake is
reported under the key that the user typed. A file without short keys is returned as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipe.dag.workflow.problem import KeyPath
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
"""Short key -> where it stands in the long form."""
KINDS: Mapping[str, str] = {"agent": "ROLLOUT", "reward": "REWARD", "vote": "VOTE", "compute": "DEFAULT"}
"""The key that says what a node is -> its role."""
KEYS = tuple(dict.fromkeys((*KINDS, *LONG)))
"""All short keys."""
TYPES: Mapping[str, str] = {
    "ROLLOUT": "MODEL_INFERENCE",
    **dict.fromkeys(("ACTOR", "CRITIC", "REFERENCE"), "MODEL_TRAIN"),
    **dict.fromkeys(("REWARD", "VOTE", "ADVANTAGE", "DEFAULT"), "COMPUTE"),
}
"""A node's role -> its type."""


def in_long_form(source: Source) -> Source:
    """Return the source with every node in the long form; itself where all are."""
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
            for place, key in moved.items():
                result.origins[(*path, *place)] = Origin(source, (*path, key))
                if len(place) == 2 and place[0] not in node:  # what is wrong with all options is said of the first key
                    result.origins.setdefault((*path, place[0]), Origin(source, (*path, key)))
    return result


def shorter(source: Source) -> str | None:
    """Return a hint where the file's nodes are written in the long form."""
    nodes = source.data.get("nodes")
    long = [node for node in nodes if isinstance(node, dict) and node.get("node_type") not in (None, "MODEL_TRAIN")]
    if not long or all(node.get("node_role") == "ADVANTAGE" for node in long):
        return None
    return "hint: nodes have a shorter form, `{id: ..., agent: ..., after: ...}` (docs/workflows.md, `verl-dag import`)"


def is_short(node: Any) -> bool:
    return isinstance(node, dict) and (bool(LONG.keys() & node.keys()) or "node_type" not in node)


def long_node(node: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str | int, ...], str]]:
    """Return (the node in the long form, where in it the value of each short key is)."""
    kinds, moved = _kinds(node), dict[tuple[str | int, ...], str]()
    long = {key: value for key, value in node.items() if key not in (*LONG, *kinds[1:])}
    if isinstance(long.get("agent_options"), dict):
        long["agent_options"] = dict(long["agent_options"])
    for key in LONG.keys() & node.keys() - set(kinds[1:]):
        _put(long, key, node[key], moved)
    if "workflow" not in node:  # a sub-workflow has no role
        role = node.get("node_role", KINDS[kinds[0]] if kinds else "DEFAULT")
        long.setdefault("node_type", TYPES.get(role.upper() if isinstance(role, str) else "", "COMPUTE"))
        long.setdefault("node_role", role)
    return long, moved


def contradictions(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong with it) where a node says one thing twice, or is two things."""
    kinds = _kinds(node)
    for key in kinds[1:]:
        yield key, f"a node is one thing: `{kinds[0]}` and `{key}` make it two; write two nodes"
    for key in LONG.keys() & node.keys() - set(kinds[1:]):
        *parents, last = LONG[key]
        holder: Any = node
        for parent in parents:
            holder = holder.get(parent)
        if isinstance(holder, dict) and last in holder:
            yield key, f"this and `{'.'.join(LONG[key])}` say the same; remove one of them"


def _kinds(node: Mapping[str, Any]) -> list[str]:
    """The keys that say what the node is. One with a role may have others: a training node names an agent, too."""
    return [key for key in node if key in KINDS and ("node_role" not in node or key in LONG)]


def _put(long: dict[str, Any], key: str, value: Any, moved: dict[tuple[str | int, ...], str]) -> None:
    """Move the value of a short key to its place."""
    *parents, last = LONG[key]
    holder = long
    for parent in parents:
        holder = holder.setdefault(parent, {})
    if not isinstance(holder, dict) or last in holder:
        return  # said twice, or `agent_options` is no mapping: reported elsewhere
    one = key == "after" and isinstance(value, str)
    holder[last] = [value] if one else value
    moved[LONG[key]] = key
    if one:
        moved[(*LONG[key], 0)] = key
