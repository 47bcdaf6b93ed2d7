"""The columns of a verl data set that concern agents and tools: `agent_name` and `tools_kwargs`.

Invariant: every entry of these columns is applied, or rejected before anything starts; none is ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.episode.toolset import TOOLS_KWARGS
from recipe.dag.workflow.schema import Workflow

SECTIONS = ("create_kwargs", "execute_kwargs")
_UNSUPPORTED = {
    "calc_reward_kwargs": "rewards come from reward nodes",
    "release_kwargs": "a tool releases its resources in `close`",
}


def columns_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the sample's `agent_name` and `tools_kwargs` if the row has them; verl reads the latter from `extra_info`.
    Raises UserError."""
    extra = row.get("extra_info") or {}
    columns: dict[str, Any] = {}
    if row.get("agent_name"):
        columns["agent_name"] = row["agent_name"]
    tools_kwargs = row.get(TOOLS_KWARGS) or extra.get(TOOLS_KWARGS)
    if tools_kwargs is None:
        return columns
    if not isinstance(tools_kwargs, dict):
        raise UserError(f"{where}: tools_kwargs must be a struct {{tool: {{create_kwargs: ...}}}}")
    tools: dict[str, dict[str, Any]] = {}
    for tool, sections in tools_kwargs.items():
        # a parquet struct has the keys of all rows; those that a row lacks are null
        if sections is not None and not isinstance(sections, dict):
            raise UserError(f"{where}: tools_kwargs.{tool} must be a struct of {' and '.join(SECTIONS)}")
        tools[tool] = _sections(sections or {}, f"{where}: tools_kwargs.{tool}")
    if tools := {tool: sections for tool, sections in tools.items() if sections}:
        columns[TOOLS_KWARGS] = tools
    return columns


def _sections(tool_kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for name, values in tool_kwargs.items():
        if not values:
            continue
        if name not in SECTIONS:
            reason = _UNSUPPORTED.get(name, f"supported: {', '.join(SECTIONS)}")
            raise UserError(f"{where}.{name}: is not supported ({reason}); remove it")
        if not isinstance(values, dict):
            raise UserError(f"{where}.{name} must be a struct")
        if present := {key: value for key, value in values.items() if value is not None}:
            sections[name] = present
    return sections


def check_columns(samples: Sequence[Mapping[str, Any]], workflow: Workflow, tools: Mapping[str, Any]) -> None:
    """Raise UserError for a sample that names an agent or a tool option that the workflow does not have. `tools` holds
    the workflow's tools, or their classes, by the name in their schema."""
    loops = any(agent.tool_loop for agent in workflow.agents)
    # verl's agent loops: tool_agent answers in one turn where there is no tool, single_turn_agent never calls one
    known = {"tool_agent"} if loops else {"tool_agent", "single_turn_agent"}
    agents = known | {agent.name for agent in workflow.agents}
    for number, sample in enumerate(samples):
        name = sample.get("agent_name")
        if name is not None and name not in agents:
            raise UserError(
                f"data: sample {number}: agent_name {name!r} is not an agent of {workflow.dag_id} ("
                f"{', '.join(sorted(agents))}); the workflow names the agents: remove the column"
            )
        for tool, sections in (sample.get(TOOLS_KWARGS) or {}).items():
            where = f"data: sample {number}: tools_kwargs.{tool}"
            if tool not in tools:
                names = ", ".join(sorted(tools)) or "none"
                raise UserError(f"{where}: no agent has a tool of that name (tools: {names}); remove it")
            _check_tool(tools[tool], sections, where)


def _check_tool(tool: Any, sections: Mapping[str, Mapping[str, Any]], where: str) -> None:
    accepted = getattr(tool, "create_kwargs", None)
    for key in sections.get("create_kwargs", {}):
        if accepted is not None and key not in accepted:
            names = ", ".join(accepted) or "none"
            raise UserError(f"{where}.create_kwargs.{key}: the tool accepts {names}; remove it")
    parameters = inspect.signature(tool.execute).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in sections.get("execute_kwargs", {}):
        if key not in parameters or key in ("self", "arguments", "state"):
            raise UserError(f"{where}.execute_kwargs.{key}: the tool's `execute` has no parameter `{key}`; remove it")
