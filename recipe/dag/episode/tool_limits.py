"""The settings of a tool besides the arguments of its class: how many calls run at once and start per second,
how long one may take, how much of its result is kept, and what the model reads about it.

Invariant: calls of models and of hooks count alike, and the limits of a declared tool hold for all agents together. A
call that waits has not started: the time limit of the call begins when the tool runs.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.pace import Pace, part_of
from recipe.dag.core.per_loop import PerLoop
from recipe.dag.core.tasks import guarded
from recipe.dag.tools.code_interpreter import clip
from recipe.dag.types.record import ToolResult
from recipe.dag.types.tool import Tool, close_tool, parameters_of, problem_of_parameters
from recipe.dag.workflow.agent_schema import DeclaredTool, ToolSpec
from recipe.dag.workflow.schema import Workflow


class Limit:
    """At most `workers` calls at once and `calls_per_second` starts per second, on each event loop; None: no limit."""

    def __init__(self, workers: int | None = None, calls_per_second: float | None = None) -> None:
        self.workers, self.calls_per_second = workers, calls_per_second
        self._slots = PerLoop(lambda: nullcontext() if workers is None else asyncio.Semaphore(workers))
        self._pace = PerLoop(lambda: Pace(calls_per_second, asyncio.get_running_loop().time))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until a call may start, and count it as running until the body ends."""
        async with self._slots.get():
            await self._pace.get().wait()
            yield

    def share(self, index: int, count: int) -> Limit:
        """Return the part of process `index` of `count`."""
        return Limit(*part_of(self.workers, self.calls_per_second, index, count))


class LimitedTool:
    """A tool with what the workflow sets on it. Everything else is the tool's own."""

    def __init__(self, tool: Tool, limit: Limit, spec: ToolSpec, *, own: Iterable[str] = ()) -> None:
        """`own`: options that the tool itself applies. Raises UserError if the parameters do not fit the tool."""
        self.tool, self.limit = tool, limit
        self.name = tool.name
        self.timeout_s = None if "timeout_s" in own else spec.timeout_s
        self.max_output_chars = None if "max_output_chars" in own else spec.max_output_chars
        self.schema: dict[str, Any] = copy.deepcopy(tool.schema)
        self.checks_arguments = getattr(tool, "checks_arguments", False) and spec.parameters is None
        if spec.parameters is not None:
            if problem := problem_of_parameters(spec.parameters, parameters_of(tool)):
                raise UserError(f"tool {spec}: `parameters` {problem}")
            self.schema["function"]["parameters"] = copy.deepcopy(spec.parameters)
        if spec.description is not None:
            self.schema["function"]["description"] = spec.description

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any], **extra: Any) -> ToolResult | str:
        return await self._run(self.tool.execute, arguments, state, extra)

    async def execute_for_hook(
        self, arguments: dict[str, Any], state: dict[str, Any], **extra: Any
    ) -> ToolResult | str:
        return await self._run(getattr(self.tool, "execute_for_hook", self.tool.execute), arguments, state, extra)

    async def close(self) -> None:
        await close_tool(self.tool)

    async def _run(
        self,
        execute: Callable[..., Awaitable[ToolResult | str]],
        arguments: dict[str, Any],
        state: dict[str, Any],
        extra: Mapping[str, Any],
    ) -> ToolResult | str:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self.limit.turn():
            waited = loop.time() - asked
            scope = asyncio.timeout(self.timeout_s)
            try:
                async with scope:
                    result = await guarded(execute(arguments, state, **extra))
            except TimeoutError:
                if not scope.expired():  # the tool's own time-out is a failure of what it asked
                    raise
                text = f"[timeout] no result within {self.timeout_s:g} s"
                result = ToolResult(self.name, arguments, "timeout", text, seconds=self.timeout_s or 0.0)
        if isinstance(result, str):
            result = ToolResult(self.schema["function"]["name"], arguments, "success", result)
        if not isinstance(result, ToolResult) or not isinstance(result.text, str):
            return result  # the caller reports it
        text = result.text if self.max_output_chars is None else clip(result.text, self.max_output_chars)
        return replace(result, text=text, waited=waited)


LIMITED = ("timeout_s", "max_output_chars", "workers", "calls_per_second", "description", "parameters")
"""The options that need a LimitedTool, where the tool does not apply them itself."""


def with_limits(
    specs: Mapping[str, ToolSpec], tools: Mapping[str, Tool], own: Callable[[ToolSpec], Iterable[str]]
) -> dict[str, Tool]:
    """Return `tools` (by `ToolSpec.key`) with what their specs set on them. `own`: the options that a tool applies
    itself. Raises UserError."""
    limits: dict[tuple[str, int | None, float | None], Limit] = {}
    result = dict(tools)
    for key in tools:
        spec = specs[key]
        applied = frozenset(own(spec))
        if all(getattr(spec, name) is None or name in applied for name in LIMITED):
            continue
        # Agents that override other parts of a declared tool still share its limits.
        declared = spec.declared if isinstance(spec, DeclaredTool) else key
        limit = limits.setdefault(
            (declared, spec.workers, spec.calls_per_second), Limit(spec.workers, spec.calls_per_second)
        )
        result[key] = LimitedTool(tools[key], limit, spec, own=applied)
    return result


def share_limits(tools: Mapping[str, Tool], index: int, count: int) -> None:
    """Reduce the limits of this process's `tools` to its part, as process `index` of `count`."""
    parts: dict[int, Limit] = {}
    for tool in tools.values():
        if isinstance(tool, LimitedTool):
            whole = tool.limit
            tool.limit = parts.setdefault(id(whole), whole.share(index, count))


def most_processes(workflow: Workflow) -> tuple[int, str] | None:
    """Return the largest number of processes in which each has a call of every tool and a request to every API, and the
    option that allows no more; None if nothing limits it."""
    tools = [(tool.workers, f"tool {tool} has `workers") for agent in workflow.agents for tool in agent.tools]
    apis = [
        (policy.api.max_concurrent, f"policies.{name}.api has `max_concurrent")
        for name, policy in workflow.policies.items()
        if policy.api is not None
    ]
    limited = [(most, f"{option}: {most}`") for most, option in tools + apis if most is not None]
    return min(limited, default=None)
