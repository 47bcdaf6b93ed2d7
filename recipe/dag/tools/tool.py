"""The tool protocol.

Invariant: `execute` returns a ToolResult for everything that the model's arguments caused, and raises a Fault for
everything that they did not. A tool instance is shared by all episodes; what must last through one episode lives in
`state`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from recipe.dag.episode.record import ToolResult


@runtime_checkable
class Tool(Protocol):
    name: str
    schema: dict[str, Any]
    """OpenAI function schema: {"type": "function", "function": {"name", "description", "parameters"}}."""

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult: ...

    async def close(self) -> None: ...
