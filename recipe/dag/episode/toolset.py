"""An agent's tools, as the model and the agent's hooks call them.

Invariant: a tool has one name, that of its schema: what the model is shown is what it can call. A tool's memory belongs
to one episode, and to all agents that declare that tool.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from recipe.dag.episode.record import ToolResult
from recipe.dag.episode.tasks import guarded
from recipe.dag.errors import Fault, ToolFault, UserError, boundary
from recipe.dag.tools.tool import Tool, tool_name
from recipe.dag.workflow.schema import Agent

TOOLS_KWARGS = "tools_kwargs"
"""A sample's: tool name -> {create_kwargs, execute_kwargs}, as verl's data sets have it."""


class Toolset:
    def __init__(self, agent: Agent, tools: Mapping[str, Tool]) -> None:
        """`tools` by `ToolSpec.key`. Raises UserError for a tool that is missing, and for two of one name."""
        self.tools: dict[str, Tool] = {}
        """By the name in their schema."""
        self._keys: dict[str, str] = {}
        self._declared: dict[str, str] = {}
        """What the workflow calls a tool -> its name."""
        if missing := [str(spec) for spec in agent.tools if spec.key not in tools]:
            known = ", ".join(sorted(tools)) or "none"
            raise UserError(f"agent {agent.name}: there is no tool {', '.join(missing)}; there is {known}")
        for spec in agent.tools:
            tool = tools[spec.key]
            name = tool_name(tool, str(spec))
            if name in self.tools:
                raise UserError(f"agent {agent.name}: two of its tools are called {name!r} in their schema; rename one")
            self.tools[name], self._keys[name] = tool, spec.key
            self._declared |= {alias: name for alias in (spec.path, spec.name) if alias}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def name_of(self, called: str) -> str | None:
        """Return the name of the tool that a hook calls by that name or as the workflow declares it."""
        return called if called in self.tools else self._declared.get(called)

    async def call(
        self,
        name: str,
        arguments: dict[str, Any],
        sample: Mapping[str, Any],
        states: dict[str, dict],
        keep: Callable[[ToolResult], None],
        *,
        by_model: bool,
    ) -> ToolResult:
        """Run one tool; `keep` takes the record of it. `states` are the episode's, by tool; a tool's memory starts with
        the sample's create_kwargs. `by_model` False: the arguments are those of a hook. Raises only Faults."""
        tool, options = self.tools[name], (sample.get(TOOLS_KWARGS) or {}).get(name) or {}
        state = states.setdefault(self._keys[name], copy.deepcopy(options.get("create_kwargs") or {}))
        execute = tool.execute if by_model else getattr(tool, "execute_for_hook", tool.execute)
        try:
            with boundary(ToolFault, f"tool {name}", execute):
                extra = copy.deepcopy(options.get("execute_kwargs") or {})
                result = await guarded(execute(arguments, state, **extra))
                if not isinstance(result, ToolResult):
                    raise ToolFault(f"returned {type(result).__name__}, not a ToolResult", where=f"tool {name}")
                if result.status == "fault":
                    raise ToolFault(result.text or "could not run", where=f"tool {name}", infra=True)
        except Fault as fault:
            keep(ToolResult(name, arguments, "fault", str(fault)))
            raise
        keep(result)
        return result
