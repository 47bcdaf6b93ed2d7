"""A tool: the model looks words up in a table, a few times per episode."""

from __future__ import annotations

from typing import Any

from verl_dag import ToolResult


class Lookup:
    """`table`: what there is to find. `limit`: lookups per episode."""

    name = "lookup"

    def __init__(self, table: dict[str, str], limit: int = 3) -> None:
        self.table, self.limit = table, limit
        self.schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": "Look a word up.",
                "parameters": {
                    "type": "object",
                    "properties": {"word": {"type": "string"}},
                    "required": ["word"],
                },
            },
        }

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult | str:
        state["lookups"] = state.get("lookups", 0) + 1
        word = arguments["word"]
        if state["lookups"] > self.limit:
            return ToolResult(self.name, arguments, "failed", f"only {self.limit} lookups are allowed")
        if word not in self.table:
            return ToolResult(self.name, arguments, "failed", f"{word!r} is not in the table")
        return self.table[word]

    async def close(self) -> None:
        """Called once, at the end of the run."""
