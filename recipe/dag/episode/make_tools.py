"""Makes the tools that a workflow's agents declare.

Invariant: agents whose declarations are equal share one instance; every tool follows the protocol, and every option of
a declaration is applied, by the tool or around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.location import raised_at
from recipe.dag.core.user_code import load_object
from recipe.dag.episode.env_class import needs_sandbox
from recipe.dag.episode.tool_limits import with_limits
from recipe.dag.tools.base import Resources
from recipe.dag.tools.builtin import BUILTIN, make_builtin
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.tool import Tool, check_tool
from recipe.dag.workflow.agent_schema import ToolSpec
from recipe.dag.workflow.interpolation import resolve_env
from recipe.dag.workflow.schema import Workflow


def user_tool(path: str, kwargs: Mapping[str, Any], workflow: Workflow) -> Tool:
    """Make the user's tool `path`. Raises UserError if it cannot be made, or does not follow the protocol."""
    tool_class = load_object(path, workflow.path)
    try:
        tool = tool_class(**kwargs)
    except UserError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error} ({raised_at(error)})"
        raise UserError(f"tool {path}: {text}; see its kwargs") from error
    check_tool(tool, path)
    return tool


def tool_specs(workflow: Workflow) -> dict[str, ToolSpec]:
    """Return the tools that the workflow's agents declare, each once."""
    return {tool.key: tool for agent in workflow.agents for tool in agent.tools}


def uses_sandbox(workflow: Workflow) -> bool:
    """Return whether a built-in tool of an agent, or the reset of an env, asks for the sandbox. Raises UserError."""
    built_in = (BUILTIN[str(spec)] for spec in tool_specs(workflow).values() if spec.path is None)
    return any(tool.needs_sandbox for tool in built_in) or needs_sandbox(workflow)


def user_tools(workflow: Workflow) -> dict[str, Tool]:
    """Make the user's tools that the workflow's agents have. Raises UserError."""
    specs = tool_specs(workflow).items()
    return {key: user_tool(spec.path, spec.kwargs, workflow) for key, spec in specs if spec.path is not None}


def built_in_tools(
    workflow: Workflow, client: SandboxClient | None, limits: Mapping[str, float], *, online: bool = True
) -> dict[str, Tool]:
    """Make this package's tools that the workflow's agents have. `limits`: of programs, for agents that set none;
    `online`: as in `Resources`. Raises UserError."""
    resources = Resources(workflow.path, client, limits, online=online)
    tools: dict[str, Tool] = {}
    for key, spec in tool_specs(workflow).items():
        if spec.path is None:
            tools[key] = make_builtin(str(spec), resolved_options(spec), resources)
    return tools


def resolved_options(spec: ToolSpec) -> dict[str, Any]:
    """Return the options of a built-in tool with the values of environment variables. Raises UserError."""
    options = spec.options(_own_options(spec))
    where = f"tool {spec}"
    return {
        key: resolve_env(value, f"{where}: {key}") if isinstance(value, str) else value
        for key, value in options.items()
    }


def limited_tools(workflow: Workflow, tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """Return the tools (by `ToolSpec.key`) with the limits and texts that the workflow sets on them. Raises
    UserError."""
    return with_limits(tool_specs(workflow), tools, _own_options)


def _own_options(spec: ToolSpec) -> tuple[str, ...]:
    """Return the names of the options that the tool applies itself."""
    return () if spec.path is not None else tuple(BUILTIN[str(spec)].Options.model_fields)


def make_tools(
    workflow: Workflow, client: SandboxClient | None, *, online: bool = True, **defaults: float
) -> dict[str, Tool]:
    """Make all tools that the workflow's agents have. Raises UserError."""
    built_in = built_in_tools(workflow, client, defaults, online=online)
    return limited_tools(workflow, user_tools(workflow) | built_in)
