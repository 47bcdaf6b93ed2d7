"""A Workflow as text in its shortest form.

Invariant: loaded again, the text gives the same workflow. Default values and derived nodes are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.catalogue import DEFAULT
from recipe.dag.core.frozen import Frozen
from recipe.dag.workflow.agent_schema import Agent, DeclaredTool, Policy, ToolSpec
from recipe.dag.workflow.checks.lora import INHERITED
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.training_chain import is_derived

WIDTH = 112
_PLAIN = re.compile(r"(?!\.\d)[A-Za-z_./][\w./-]*(?::[A-Za-z_][\w.]*)?")
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n", ".inf", ".nan", ".", ".."})


def to_yaml(workflow: Workflow, comments: Iterable[str] = ()) -> str:
    """Return the workflow as YAML, with `comments` as the first lines."""
    parts: list[tuple[str, Any]] = [("dag_id", workflow.dag_id)]
    if workflow.description:
        parts.append(("description", workflow.description))
    parts.append(("agents", [_agent(workflow, agent) for agent in workflow.agents]))
    for key in ("policies", "tools", "envs", "loops"):
        pieces = {name: _without_defaults(piece) for name, piece in getattr(workflow, key).items()}
        if pieces:
            parts.append((key, pieces))
    blocks = (("episode", _without_defaults(workflow.episode)), ("algorithm", _algorithm(workflow.algorithm)))
    for key, settings in blocks:
        if settings:
            parts.append((key, settings))
    parts.append(("nodes", [_node(node) for node in workflow.nodes if not is_derived(node.id)]))
    lines = [f"# {comment}".rstrip() for comment in comments]
    for key, value in parts:
        spaced = key in ("agents", "policies", "tools", "envs", "episode", "loops", "algorithm", "nodes")
        lines += [""] if spaced else []
        lines += _entry(key, value, 0, block=isinstance(value, list) or key in ("policies", "tools", "envs", "loops"))
    return "\n".join(lines) + "\n"


def _without_defaults(piece: Frozen) -> dict[str, Any]:
    inherited: set[str] | None = set(INHERITED) if isinstance(piece, Policy) and piece.parent is not None else None
    return piece.model_dump(mode="json", exclude_defaults=True, exclude=inherited)


def _agent(workflow: Workflow, agent: Agent) -> dict[str, Any]:
    """Return the agent, with declared tools by their names and what it overrides."""
    written = _without_defaults(agent)
    for position, tool in enumerate(agent.tools):
        if isinstance(tool, DeclaredTool):
            overrides = _overrides(tool, workflow.tools[tool.declared])
            written["tools"][position] = {"name": tool.declared, **overrides} if overrides else tool.declared
    return written


def _overrides(tool: DeclaredTool, base: ToolSpec) -> dict[str, Any]:
    """Return the keys that an agent writes beside the name of a declared tool."""
    keys = ToolSpec.model_fields.keys() - {"name", "path", "kwargs"}
    changed = {key: getattr(tool, key) for key in sorted(keys) if getattr(tool, key) != getattr(base, key)}
    kwargs = {key: value for key, value in tool.kwargs.items() if key not in base.kwargs or base.kwargs[key] != value}
    return changed | ({"kwargs": kwargs} if kwargs else {})


def _algorithm(algorithm: Algorithm) -> dict[str, Any]:
    """Return the options that differ from their estimator's defaults."""
    default = type(algorithm)(estimator=algorithm.estimator).model_dump(mode="json")
    options: dict[str, Any] = {} if type(algorithm) is DEFAULT else {"estimator": algorithm.estimator}
    for key, value in algorithm.model_dump(mode="json").items():
        if value != default[key]:
            option = getattr(algorithm, key)
            options[key] = _without_defaults(option) if isinstance(option, Frozen) else value
    return options


def _node(node: Node) -> dict[str, Any]:
    """Return the node, with names that are alone without a list."""
    written = _without_defaults(node)
    single = {key: names[0] for key in ("after", "env") if len(names := written.get(key, ())) == 1}
    return written | single


def _entry(key: str, value: Any, indent: int, *, block: bool = False) -> list[str]:
    """Return `key: value` in one line if it fits, and otherwise in several."""
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
