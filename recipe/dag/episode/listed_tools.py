"""The tools of servers that describe their tools themselves, put in place of the server.

Invariant: a workflow that is returned holds everything that a model is shown of a tool, so that every process of a run
shows the same; the file's own workflow names the server alone, and is loaded without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.episode.make_tools import resolved_options
from recipe.dag.tools.base import BuiltinTool
from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.tools.mcp import Mcp, list_server, shown_name, stand_ins
from recipe.dag.types.tool import Tool
from recipe.dag.workflow.agent_schema import Agent, DeclaredTool, ToolSpec
from recipe.dag.workflow.schema import Workflow

Listing = list[dict[str, Any]]


async def with_listed_tools(workflow: Workflow) -> Workflow:
    """Ask the MCP servers of a workflow for their tools, and return the workflow with one tool for each in place of the
    server. Raises UserError."""
    specs = _servers(workflow)
    listings = await asyncio.gather(*(list_server(_options(spec)) for spec in specs.values()))
    return _replaced(workflow, dict(zip(specs, listings, strict=True)))


def with_stand_ins(workflow: Workflow) -> Workflow:
    """Do the same without the servers: the tools have the names in the workflow, and take any arguments."""
    return _replaced(workflow, {key: stand_ins(_options(spec)) for key, spec in _servers(workflow).items()})


def describe_servers(workflow: Workflow) -> list[str]:
    """Return a line for each server whose tools are listed in the workflow."""
    names: dict[str, list[str]] = {}
    for spec in (spec for agent in workflow.agents for spec in agent.tools if spec.kwargs.get("listed")):
        listed = names.setdefault(_options(spec).url, [])
        listed += [name for name in spec.kwargs["tools"] if name not in listed]
    return [f"{url} lists {', '.join(listed)}" for url, listed in names.items()]


async def check_tools(tools: Mapping[str, Tool]) -> list[str]:
    """Ask the servers of built-in tools, and return what they said. Raises UserError for one that cannot be used."""
    own = [getattr(tool, "tool", tool) for tool in tools.values()]
    reports = await asyncio.gather(*(tool.check() for tool in own if isinstance(tool, BuiltinTool)))
    return [text for text in reports if text]


def _servers(workflow: Workflow) -> dict[str, ToolSpec]:
    """Return the placeholders of all tools of a server, by `ToolSpec.key`."""
    specs = [spec for agent in workflow.agents for spec in agent.tools if spec.path is None]
    return {spec.key: spec for spec in specs if BUILTIN[str(spec)].several and not spec.kwargs.get("listed")}


def _options(spec: ToolSpec) -> Mcp.Options:
    return Mcp.Options(**resolved_options(spec))


def _replaced(workflow: Workflow, listings: Mapping[str, Listing]) -> Workflow:
    if not listings:
        return workflow
    agents = tuple(_with_tools(agent, listings) for agent in workflow.agents)
    return workflow.model_copy(update={"agents": agents})


def _with_tools(agent: Agent, listings: Mapping[str, Listing]) -> Agent:
    tools: list[ToolSpec] = []
    for spec in agent.tools:
        if spec.key not in listings:
            tools.append(spec)
            continue
        prefix = spec.kwargs.get("prefix", "")
        names = [shown_name(tool["name"], prefix) for tool in listings[spec.key]]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"agent {agent.name}: two tools of {spec.kwargs['url']} would be called {twice[0]!r}")
        # the limits of a declaration hold for all tools of the server together
        declared = spec.declared if isinstance(spec, DeclaredTool) else spec.key
        for tool in listings[spec.key]:
            options = {key: getattr(spec, key) for key in spec.model_fields_set - {"declared", "kwargs"}}
            kwargs = {**spec.kwargs, "tools": [tool["name"]], "listed": tool}
            tools.append(DeclaredTool(**options, kwargs=kwargs, declared=declared))
    return agent.model_copy(update={"tools": tuple(tools)})
