"""What a row of a verl data set says about agents and tools: `agent_name` and `tools_kwargs`.

Invariant: what a row says is done or refused before anything starts; nothing of it is dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from recipe.dag.episode.toolset import TOOLS_KWARGS
from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow

SECTIONS = ("create_kwargs", "execute_kwargs")
_NOT_HERE = {
    "calc_reward_kwargs": "rewards come from reward nodes",
    "release_kwargs": "a tool gives its resources back in `close`",
}


def columns_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the sample's `agent_name` and `tools_kwargs`, where the row has them; verl reads the latter from
    `extra_info`. Raises UserError."""
    extra = row.get("extra_info") or {}
    columns: dict[str, Any] = {}
    if row.get("agent_name"):
        columns["agent_name"] = row["agent_name"]
    given = row.get(TOOLS_KWARGS) or extra.get(TOOLS_KWARGS)
    if given is None:
        return columns
    if not isinstance(given, dict):
        raise UserError(f"{where}: tools_kwargs must be a struct {{tool: {{create_kwargs: ...}}}}")
    tools: dict[str, dict[str, Any]] = {}
    for tool, sections in given.items():
        # A parquet struct has every row's keys; those that a row does not have are null.
        if sections is not None and not isinstance(sections, dict):
            raise UserError(f"{where}: tools_kwargs.{tool} must be a struct of {' and '.join(SECTIONS)}")
        tools[tool] = _sections(sections or {}, f"{where}: tools_kwargs.{tool}")
    if tools := {tool: sections for tool, sections in tools.items() if sections}:
        columns[TOOLS_KWARGS] = tools
    return columns


def _sections(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for name, values in given.items():
        if not values:
            continue
        if name not in SECTIONS:
            why = _NOT_HERE.get(name, f"there is {', '.join(SECTIONS)}")
            raise UserError(f"{where}.{name}: is not supported ({why}); remove it")
        if not isinstance(values, dict):
            raise UserError(f"{where}.{name} must be a struct")
        if kept := {key: value for key, value in values.items() if value is not None}:
            sections[name] = kept
    return sections


def check_columns(samples: Sequence[Mapping[str, Any]], workflow: Workflow, tools: Mapping[str, Any]) -> None:
    """Raise UserError for a row that asks for what the workflow does not have. `tools`: the workflow's tools, or their
    classes, by the name in their schema."""
    loops = any(agent.tool_loop for agent in workflow.agents)
    known = {"tool_agent" if loops else "single_turn_agent", *(agent.name for agent in workflow.agents)}
    for number, sample in enumerate(samples):
        name = sample.get("agent_name")
        if name is not None and name not in known:
            raise UserError(
                f"data: sample {number}: agent_name {name!r} is not what {workflow.dag_id} runs ("
                f"{', '.join(sorted(known))}); the workflow decides who takes part: remove the column"
            )
        for tool, sections in (sample.get(TOOLS_KWARGS) or {}).items():
            where = f"data: sample {number}: tools_kwargs.{tool}"
            if tool not in tools:
                there = ", ".join(sorted(tools)) or "none"
                raise UserError(f"{where}: no agent has a tool of that name (there is {there}); remove it")
            _check_tool(tools[tool], sections, where)


def _check_tool(tool: Any, sections: Mapping[str, Mapping[str, Any]], where: str) -> None:
    takes = getattr(tool, "create_kwargs", None)
    for key in sections.get("create_kwargs", {}):
        if takes is not None and key not in takes:
            raise UserError(f"{where}.create_kwargs.{key}: the tool takes {', '.join(takes) or 'none'}; remove it")
    parameters = inspect.signature(tool.execute).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in sections.get("execute_kwargs", {}):
        if key not in parameters or key in ("self", "arguments", "state"):
            raise UserError(f"{where}.execute_kwargs.{key}: the tool's `execute` takes no `{key}`; remove it")
