"""An agent's tools, as the model and the agent's hooks call them.

Invariant: a tool has one name, that of its schema: the model calls exactly what it is shown. A tool's state belongs to
one episode and is shared by all agents that declare the tool.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from recipe.dag.core.errors import Fault, ToolFault, UserError, boundary
from recipe.dag.core.tasks import guarded
from recipe.dag.episode.tool_limits import LimitedTool
from recipe.dag.types.record import STATUSES, ToolResult
from recipe.dag.types.tool import Tool, argument_validator, tool_name
from recipe.dag.workflow.agent_schema import Agent, DeclaredTool

REFUSED = "invalid arguments: "
"""Start of the answer to a call that does not fit the tool's schema."""
TOOLS_KWARGS = "tools_kwargs"
"""Key of a sample: tool name -> {create_kwargs, execute_kwargs}, as in verl's data sets."""


class Toolset:
    """The tools of one agent."""

    def __init__(self, agent: Agent, tools: Mapping[str, Tool]) -> None:
        """`tools` by `ToolSpec.key`. Raises UserError if a tool is missing or two have the same name."""
        self.tools: dict[str, Tool] = {}
        """By the name in their schema."""
        self._keys: dict[str, str] = {}
        self._validators: dict[str, Any] = {}
        """Name -> a JSON schema validator of the model's arguments, for tools that do not check them."""
        self._declared: dict[str, str] = {}
        """The path or name by which the workflow declares a tool -> its name."""
        if missing := [str(spec) for spec in agent.tools if spec.key not in tools]:
            available = ", ".join(sorted(tools)) or "none"
            raise UserError(f"agent {agent.name}: unknown tool {', '.join(missing)}; available: {available}")
        for spec in agent.tools:
            tool = tools[spec.key]
            name = tool_name(tool, str(spec))
            if name in self.tools:
                raise UserError(f"agent {agent.name}: two of its tools are called {name!r} in their schema; rename one")
            self.tools[name], self._keys[name] = tool, spec.key
            aliases = {spec.path, spec.name, spec.declared if isinstance(spec, DeclaredTool) else None}
            for alias in filter(None, aliases):
                # a name that several tools share, such as their server's, is the name of none of them
                self._declared[alias] = name if alias not in self._declared else ""
            if not getattr(tool, "checks_arguments", False):
                self._validators[name] = argument_validator(tool, str(spec))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def name_of(self, called: str) -> str | None:
        """Return the name of the tool that a hook calls by its name or as the workflow declares it; None if unknown."""
        return called if called in self.tools else self._declared.get(called) or None

    async def call(
        self,
        name: str,
        arguments: dict[str, Any],
        sample: Mapping[str, Any],
        states: dict[str, dict],
        keep: Callable[[ToolResult], None],
        *,
        by_model: bool,
        added: Mapping[str, Any] | None = None,
    ) -> ToolResult:
        """Run a tool and pass its record to `keep`. Raises only Faults.

        `states`: the episode's tool states, by `ToolSpec.key`; a state starts as the sample's create_kwargs and
        `added`. `by_model` is False if a hook calls the tool.
        """
        if by_model and (problem := self._problem(name, arguments)) is not None:
            result = ToolResult(name, arguments, "invalid", _readable(f"{REFUSED}{problem}"))
            keep(result)
            return result
        tool, options = self.tools[name], (sample.get(TOOLS_KWARGS) or {}).get(name) or {}
        start = copy.deepcopy({**(options.get("create_kwargs") or {}), **(added or {})})
        state = states.setdefault(self._keys[name], start)
        execute = tool.execute if by_model else getattr(tool, "execute_for_hook", tool.execute)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            users = tool.tool if isinstance(tool, LimitedTool) else tool
            with boundary(ToolFault, f"tool {name}", users.execute):
                extra = copy.deepcopy(options.get("execute_kwargs") or {})
                result = await guarded(execute(arguments, state, **extra))
                result = _checked(result, name, arguments)
                if result.status == "fault":
                    raise ToolFault(result.text or "could not run", where=f"tool {name}", infra=True)
                result = replace(result, text=_readable(result.text))
        except Fault as fault:
            keep(ToolResult(name, arguments, "fault", str(fault), seconds=loop.time() - started))
            raise
        if not result.seconds:
            result = replace(result, seconds=loop.time() - started - result.waited)
        keep(result)
        return result

    def _problem(self, name: str, arguments: dict[str, Any]) -> str | None:
        """Return what is wrong with a model's arguments by the tool's schema; None if nothing is."""
        validator = self._validators.get(name)
        error = next(validator.iter_errors(arguments), None) if validator is not None else None
        if error is None:
            return None
        where = f" (at {'.'.join(map(str, error.path))})" if error.path else ""
        return f"{error.message[:200]}{where}"


def _readable(text: str) -> str:
    """Return a text without lone surrogates, which no tokenizer takes: tools quote what models and servers wrote."""
    return text.encode("utf-8", "replace").decode()


def _checked(result: Any, name: str, arguments: dict[str, Any]) -> ToolResult:
    """Return what a tool returned as a ToolResult; text is a successful one. Raises ToolFault."""
    if isinstance(result, str):
        return ToolResult(name, arguments, "success", result)
    if not isinstance(result, ToolResult):
        raise ToolFault(f"returned {type(result).__name__}, not a str or a ToolResult", where=f"tool {name}")
    if result.status not in STATUSES:
        known = ", ".join(STATUSES)
        raise ToolFault(f"returned the status {result.status!r}; it must be one of {known}", where=f"tool {name}")
    return result
