"""The protocol of tools, and the check that an object follows it.

Invariant: `execute` returns a ToolResult for everything that the model's arguments caused, and raises for everything
else. All episodes share a tool instance; what must last for one episode is kept in `state`.
"""

from __future__ import annotations

import inspect
import json
from typing import Any, Protocol, runtime_checkable

from recipe.dag.core.errors import UserError, described
from recipe.dag.types.convention import TOOL
from recipe.dag.types.record import ToolResult


@runtime_checkable
class Tool(Protocol):
    """A tool that models and hooks can call::

        class Search:
            name = "search"
            schema = {
                "type": "function",
                "function": {"name": "search", "description": "...", "parameters": {"type": "object", ...}},
            }

            async def execute(self, arguments, state):
                return self.index.look_up(arguments["query"])

    Text is a successful result. Return a ToolResult for anything else, such as
    `ToolResult("search", arguments, "failed", "no such page")`. The engine answers calls whose arguments do not fit the
    schema, unless an attribute `checks_arguments` is true. An optional method `execute_for_hook`, with the signature of
    `execute`, runs the calls that hooks make; an optional `async def close(self)` is awaited at the end of the run. An
    optional attribute `create_kwargs` lists the names that a sample's `create_kwargs` may use.
    """

    name: str
    schema: dict[str, Any]
    """OpenAI's function schema. The model calls the tool by the name in it."""

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult | str:
        """Run the tool. Raise only for what the model did not cause: an exception is a fault, and the episode is
        repeated or discarded.

        arguments: the model's, as parsed from JSON; they fit the schema.
        state: a dict that lasts for one episode. It starts as the `create_kwargs` of the sample's `tools_kwargs`; the
            `execute_kwargs` there are passed to this method by keyword.
        """
        ...


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
    """Check that an object follows the protocol. Raises UserError."""
    for method, convention in TOOL.items():
        function = getattr(tool, method, None)
        if function is None and not convention.required:
            continue
        if not callable(function):
            raise UserError(f"tool {where}: has no method `{method}`; write `async def {method}(self, ...)`")
        if not inspect.iscoroutinefunction(inspect.unwrap(function)):
            raise UserError(f"tool {where}: `{method}` must be `async def`")
        convention.check(function, f"tool {where}: `{method}`")
    tool_name(tool, where)
    argument_validator(tool, where)


async def close_tool(tool: Any) -> None:
    """Release the tool's resources, if it has a method `close` that does."""
    if (close := getattr(tool, "close", None)) is not None:
        await close()


def parameters_of(tool: Any) -> dict[str, Any]:
    """Return the JSON schema of the tool's arguments."""
    return tool.schema["function"].get("parameters") or {"type": "object"}


def argument_validator(tool: Any, where: str) -> Any:
    """Return a validator of arguments by the tool's schema. Raises UserError if that is not a JSON schema."""
    from jsonschema import Draft202012Validator

    parameters = parameters_of(tool)
    if problem := problem_of_parameters(parameters):
        raise UserError(f"tool {where}: `parameters` of its schema {problem}")
    return Draft202012Validator(parameters)


def problem_of_parameters(parameters: dict[str, Any], own: dict[str, Any] | None = None) -> str | None:
    """Return why a JSON schema of arguments cannot be used; None if it can. `own`: the schema of the tool for which it
    is shown to the model."""
    from jsonschema import Draft202012Validator, SchemaError

    if '"$ref"' in json.dumps(parameters, default=str):
        return "has a `$ref`; write the definition in its place"
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        return f"is not a JSON schema: {error.message}"
    visible, taken = (schema.get("properties") or {} for schema in (parameters, own or {}))
    if own is not None and taken:
        if unknown := [name for name in visible if name not in taken]:
            return f"shows the argument `{unknown[0]}`, which the tool does not take ({', '.join(taken)})"
        if hidden := [name for name in own.get("required", ()) if name not in visible]:
            return f"hides the argument `{hidden[0]}`, which the tool needs"
    return None
