"""A Workflow as text in its shortest form.

Invariant: loaded again, the text gives the same workflow. What has its default and what is derived is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.catalogue import DEFAULT
from recipe.dag.workflow.checks.training import TRAINING
from recipe.dag.workflow.schema import Frozen, Node, NodeRole, Workflow
from recipe.dag.workflow.short_form import LONG
from recipe.dag.workflow.training_chain import is_derived

WIDTH = 112
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*(?::[A-Za-z_][\w.]*)?")
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n", ".inf", ".nan", ".", ".."})


def to_yaml(workflow: Workflow, comments: Iterable[str] = ()) -> str:
    """`comments` go to the top, one line each."""
    parts: list[tuple[str, Any]] = [("dag_id", workflow.dag_id)]
    if workflow.description:
        parts.append(("description", workflow.description))
    parts.append(("agents", [_given(agent) for agent in workflow.agents]))
    for key in ("policies", "envs", "loops"):
        pieces = {name: _given(piece) for name, piece in getattr(workflow, key).items()}
        if pieces:
            parts.append((key, pieces))
    for key, settings in (("episode", _given(workflow.episode)), ("algorithm", _algorithm(workflow.algorithm))):
        if settings:
            parts.append((key, settings))
    parts.append(("nodes", [_node(workflow, node) for node in workflow.nodes if not is_derived(node.node_id)]))
    lines = [f"# {comment}".rstrip() for comment in comments]
    for key, value in parts:
        spaced = key in ("agents", "policies", "envs", "episode", "loops", "algorithm", "nodes")
        lines += [""] if spaced else []
        lines += _entry(key, value, 0, block=isinstance(value, list) or key in ("policies", "envs", "loops"))
    return "\n".join(lines) + "\n"


def _given(piece: Frozen) -> dict[str, Any]:
    return piece.model_dump(mode="json", exclude_defaults=True)


def _algorithm(algorithm: Algorithm) -> dict[str, Any]:
    """Without what its estimator sets by itself."""
    default = type(algorithm)(estimator=algorithm.estimator).model_dump(mode="json")
    found = algorithm.model_dump(mode="json")
    named = {} if type(algorithm) is DEFAULT else {"estimator": algorithm.estimator}
    return named | {
        key: _given(getattr(algorithm, key)) if isinstance(getattr(algorithm, key), Frozen) else value
        for key, value in found.items()
        if value != default[key]
    }


def _node(workflow: Workflow, node: Node) -> dict[str, Any]:
    """In the short form, but for training nodes, which have none."""
    given = _given(node)
    given.pop("agent_group", None)
    if node.node_role in TRAINING:
        first = ("node_id", "node_type", "node_role")
        return {key: given.pop(key) for key in first if key in given} | given
    for key in ("node_type", "node_role"):
        given.pop(key, None)
    short: dict[str, Any] = {"id": given.pop("node_id")}
    if node.node_role is NodeRole.ROLLOUT:
        short["agent"] = workflow.agent_of(node).name
    if node.node_role is NodeRole.VOTE:
        short["vote"] = given.pop("vote", {})
    if "executable_ref" in given:
        short["reward" if node.node_role is NodeRole.REWARD else "compute"] = given.pop("executable_ref")
    given |= {("agent_options", key): value for key, value in given.pop("agent_options", {}).items()}
    for key, place in LONG.items():
        long = place[0] if len(place) == 1 else place
        if key not in short and long in given:
            value = given.pop(long)
            alone = key in ("after", "env") and len(value) == 1
            short[key] = value[0] if alone else value
    return short | given


def _entry(key: str, value: Any, indent: int, *, block: bool = False) -> list[str]:
    """`key: value` in one line where it fits, below each other where not."""
    pad = " " * indent
    short = f"{pad}{_scalar(key)}: {_flow(value)}"
    if not value and isinstance(value, dict | list) or not isinstance(value, dict | list):
        return [short]
    if not block and len(short) <= WIDTH:
        return [short]
    return [f"{pad}{_scalar(key)}:", *_block(value, indent + 2)]


def _block(value: Any, indent: int) -> list[str]:
    pad = " " * indent
    if isinstance(value, dict):
        return [line for key, item in value.items() for line in _entry(key, item, indent)]
    lines = []
    for item in value:
        short = f"{pad}- {_flow(item)}"
        if len(short) <= WIDTH or not isinstance(item, dict | list) or not item:
            lines.append(short)
        else:
            first, *rest = _block(item, indent + 2)
            lines += [f"{pad}- {first[indent + 2 :]}", *rest]
    return lines


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    return "".join(map(_printable, json.dumps(value, ensure_ascii=False)))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
