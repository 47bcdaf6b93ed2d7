"""An agent's tools, each with the options that it has after the agent's overrides.

Invariant: a name that is declared under `tools` refers to the declaration; what an agent writes beside the name
replaces that part of it, and `kwargs` are merged. A name that is not declared is kept, for the checks to report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipe.dag.core.problem import KeyPath
from recipe.dag.workflow.agent_schema import DeclaredTool, ToolSpec
from recipe.dag.workflow.draft import Draft


def resolve_tools(draft: Draft) -> None:
    """Replace the tools of each agent by their declarations."""
    for index, agent in draft.each_agent():
        tools = tuple(_resolved(draft, tool) for tool in agent.tools)
        if tools != agent.tools:
            draft.agents[index] = agent.model_copy(update={"tools": tools})


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


def overrides_of(tool: DeclaredTool, base: ToolSpec) -> dict[str, Any]:
    """Return the keys that an agent writes beside the name of a declared tool; the inverse of the resolution."""
    keys = ToolSpec.model_fields.keys() - {"name", "path", "kwargs"}
    changed = {key: getattr(tool, key) for key in sorted(keys) if getattr(tool, key) != getattr(base, key)}
    kwargs = {key: value for key, value in tool.kwargs.items() if key not in base.kwargs or base.kwargs[key] != value}
    return changed | ({"kwargs": kwargs} if kwargs else {})


def each_tool(draft: Draft) -> Iterator[tuple[KeyPath, dict[str, Any], ToolSpec]]:
    """Yield (path, the mapping written there, the tool with all of its options) of each mapping that declares or
    overrides a tool."""
    for name, spec in draft.tools.items():
        if spec is not None:
            named = spec.path is not None or spec.name is not None
            yield ("tools", name), draft.source.data["tools"][name], spec if named else _named(spec, name)
    for index, agent in draft.each_agent():
        for position, tool in enumerate(agent.tools):
            path: KeyPath = ("agents", index, "tools", position)
            written = draft.source.data["agents"][index]["tools"][position]
            if isinstance(written, dict):
                yield path, written, tool


def _named(spec: ToolSpec, name: str) -> ToolSpec:
    return spec.model_copy(update={"name": name})
