"""The tool protocol.

Invariant: `execute` returns a ToolResult for everything that the model's arguments caused, and raises a Fault for
everything that they did not. A tool instance is shared by all episodes; what must last through one episode lives in
`state`.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

from recipe.dag.episode.record import ToolResult
from recipe.dag.errors import UserError, described


@runtime_checkable
class Tool(Protocol):
    name: str
    schema: dict[str, Any]
    """OpenAI function schema: {"type": "function", "function": {"name", "description", "parameters"}}."""

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult: ...

    # A sample's tools_kwargs: create_kwargs are what `state` starts with (an attribute `create_kwargs` may list the
    # names that the tool knows), execute_kwargs are passed to `execute` by keyword.
    # A method `execute_for_hook` of the same signature, if there is one, runs what an agent's hook asks for.

    async def close(self) -> None: ...


def tool_name(tool: Any, where: str) -> str:
    """Return the name in the tool's schema, by which models call it. Raises UserError."""
    schema = getattr(tool, "schema", None)
    function = schema.get("function") if isinstance(schema, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise UserError(
            f"tool {where}: `schema` is {described(schema)}; it must be "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
        )
    return name


def check_tool(tool: Any, where: str) -> None:
    """Raise UserError for an object that does not follow the protocol."""
    for method, arguments in (("execute", ("arguments", "state")), ("close", ())):
        function = getattr(tool, method, None)
        if not callable(function):
            raise UserError(f"tool {where}: has no method `{method}`; write `async def {method}(self, ...)`")
        if not inspect.iscoroutinefunction(inspect.unwrap(function)):
            raise UserError(f"tool {where}: `{method}` must be `async def`")
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            shown = ", ".join(arguments)
            raise UserError(f"tool {where}: `{method}` must take ({shown}): {error}") from error
    tool_name(tool, where)
