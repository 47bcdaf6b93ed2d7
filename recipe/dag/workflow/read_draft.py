"""Conversion of a source to a draft: each piece is read by itself.

Invariant: a piece in the result is valid by itself, and a rollout node's agent exists; all other references are left
to the checks. A tool of an agent that names an entry of `tools` has the options of that entry: what the agent writes
beside the name replaces that part of it, and `kwargs` are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from recipe.dag.core.frozen import Frozen, M
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import closest, did_you_mean
from recipe.dag.workflow.agent_schema import Agent, DeclaredTool, Policy, ToolSpec
from recipe.dag.workflow.draft import TOP_LEVEL, Draft
from recipe.dag.workflow.node import KEYS, Node
from recipe.dag.workflow.parse_model import parse_algorithm, parse_piece, show_value
from recipe.dag.workflow.schema import EnvSpec, EpisodeSpec, Loop
from recipe.dag.workflow.source import Source

_MAPPINGS: tuple[tuple[str, type[Frozen], str | None, tuple[str, ...]], ...] = (
    ("policies", Policy, '{main: {model: {path: "${oc.env:MODEL_PATH}"}}}', ()),
    ("tools", ToolSpec, None, ()),
    ("envs", EnvSpec, None, ("path",)),
    ("loops", Loop, None, ("nodes", "max_rounds")),
)
"""(block, class of its entries, example if the block is required, keys without which an entry cannot be read)."""


def read_draft(source: Source) -> Draft:
    draft = Draft(source, problems=list(source.problems))
    _read_top_level(draft)
    for key, model, example, essential in _MAPPINGS:
        for name, data in _collection(draft, key, dict, example).items():
            getattr(draft, key)[name] = _read(draft, model, data, (key, name), essential)
    for index, data in enumerate(_collection(draft, "agents", list, "[{name: solver, policy: main}]")):
        agent = _read(draft, Agent, data, ("agents", index), ("name", "policy"))
        draft.agents.append(agent and _with_declared_tools(draft, agent))
        draft.agent_names.append(_text_of(data, "name"))
    for index, data in enumerate(_collection(draft, "nodes", list, "[{id: solve, agent: solver}]")):
        draft.node_ids.append(_text_of(data, "id"))
        draft.nodes.append(_read_node(draft, data, ("nodes", index)))
    for name, read in (("episode", partial(parse_piece, EpisodeSpec)), ("algorithm", parse_algorithm)):
        if name in source.data:
            piece, problems = read(source.data[name], source, (name,))
            draft.problems += problems
            if piece is not None:
                setattr(draft, name, piece)
    return draft


def _read(draft: Draft, model: type[M], data: Any, path: KeyPath, essential: Iterable[str]) -> M | None:
    """Return the piece at `path`, and report its mistakes."""
    piece, problems = parse_piece(model, data, draft.source, path, essential=frozenset(essential))
    draft.problems += problems
    return piece


def _read_top_level(draft: Draft) -> None:
    source, data = draft.source, draft.source.data
    for key in data:
        if key not in TOP_LEVEL and not key.startswith("x-"):
            hint = did_you_mean(key, TOP_LEVEL)
            message = f"unknown key{hint} (keys that start with `x-` may hold anchors)"
            draft.problems.append(source.problem((key,), message, key=True))
    if "dag_id" not in data:
        draft.problems.append(source.problem((), "`dag_id` is missing; give the workflow a name"))
    for key in ("dag_id", "description"):
        value = data.get(key, "")
        if not isinstance(value, str) or (key == "dag_id" and key in data and not value.strip()):
            draft.problems.append(source.problem((key,), f"expected text, got {show_value(value)}"))
        else:
            setattr(draft, key, value)
    if not isinstance(data.get("global_config", {}), dict):
        message = f"expected a mapping, got {show_value(data['global_config'])}"
        draft.problems.append(source.problem(("global_config",), message))


def _collection(draft: Draft, key: str, kind: type, example: str | None) -> Any:
    """Return the top-level list or mapping `key`, or an empty one if it is missing or invalid, which is reported.
    Without an `example` it may be missing."""
    data = draft.source.data
    if key not in data:
        if example is not None:
            draft.problems.append(draft.source.problem((), f"`{key}` is missing; write `{key}: {example}`"))
        return kind()
    if not isinstance(data[key], kind):
        expected = "a list" if kind is list else "a mapping"
        draft.problems.append(draft.source.problem((key,), f"expected {expected}, got {show_value(data[key])}"))
        return kind()
    if not data[key]:
        hint = f"write `{key}: {example}`" if example is not None else "remove it"
        draft.problems.append(draft.source.problem((key,), f"must not be empty; {hint}"))
    return data[key]


def _text_of(data: Any, key: str) -> str:
    """Return the text under `key`, or "" if there is none."""
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, str) else ""


def _with_declared_tools(draft: Draft, agent: Agent) -> Agent:
    tools = tuple(_resolved(draft, tool) for tool in agent.tools)
    return agent.model_copy(update={"tools": tools}) if tools != agent.tools else agent


def _resolved(draft: Draft, tool: ToolSpec) -> ToolSpec:
    base = draft.tools.get(tool.name or "") if tool.path is None else None
    if base is None or tool.name is None:
        return tool
    options: dict[str, Any] = {key: getattr(base, key) for key in base.model_fields_set}
    if not base.path and not base.name:
        options["name"] = tool.name  # the options of the built-in tool of that name
    options |= {key: getattr(tool, key) for key in tool.model_fields_set - {"name", "kwargs"}}
    if kwargs := base.kwargs | tool.kwargs:
        options["kwargs"] = kwargs
    return DeclaredTool(**options, declared=tool.name)


def _read_node(draft: Draft, data: Any, path: KeyPath) -> Node | None:
    node = _read(draft, Node, data, path, ("id", "after", *KEYS))
    if not isinstance(data, dict):
        return node
    problems = [] if draft.unread(_text_of(data, "id")) else list(_kind_problems(draft, data, path))
    draft.problems += problems
    return None if problems or len(_kinds(data)) != 1 else node


def _kinds(data: dict[str, Any]) -> list[str]:
    return [key for key in data if key in KEYS and data[key] is not None]


def _kind_problems(draft: Draft, data: dict[str, Any], path: KeyPath) -> Iterator[Problem]:
    """Check that the node has one kind, and that its agent exists."""
    problem, kinds = draft.source.problem, _kinds(data)
    misspelt = any(closest(key, Node.model_fields) in KEYS for key in data.keys() - Node.model_fields.keys())
    if not kinds and not misspelt:  # a misspelt key was reported; other mistakes would follow from it
        yield problem(path, "the node has no kind; add `agent:`, `reward:`, `vote:`, `compute:` or `workflow:`")
    for key in kinds[1:]:
        message = f"a node has one kind, but `{kinds[0]}` and `{key}` give it two; write two nodes"
        yield problem((*path, key), message, key=True)
    agent = data.get("agent")
    known = draft.agent_names and "" not in draft.agent_names  # an agent without a name was reported
    if isinstance(agent, str) and known and agent not in draft.agent_names:
        message = f"no agent `{agent}`{did_you_mean(agent, draft.agent_names)}"
        yield problem((*path, "agent"), message)
