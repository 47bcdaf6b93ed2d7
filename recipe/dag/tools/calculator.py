"""The tool `calculator`: the value of one arithmetic expression.

Invariant: every call of the model yields a ToolResult; nothing is executed, and no call takes long.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from recipe.dag.core.frozen import Frozen
from recipe.dag.tools.arithmetic import CalculationError, evaluate, show
from recipe.dag.tools.base import BuiltinTool, Resources, function_schema
from recipe.dag.types.record import ToolResult


class Calculator(BuiltinTool):
    """Computes with whole numbers and fractions exactly, and otherwise with floats."""

    name = "calculator"

    class Options(Frozen):
        """`kwargs` in a workflow."""

        digits: int = Field(default=12, ge=1, le=17)
        """Significant digits of results that are not whole."""

    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "expression": {
                "type": "string",
                "description": "One expression, such as 2*(3+4)^2, 17 % 5, sqrt(2)/3, comb(10, 3) or sin(pi/4).",
            },
        },
        "required": ["expression"],
    }

    @classmethod
    def make(cls, options: Options, resources: Resources) -> Calculator:
        return cls(options.digits)

    def __init__(self, digits: int = 12) -> None:
        self._digits = digits
        description = "Compute the value of an arithmetic expression."
        self.schema = function_schema(self.name, description, self.parameters)

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            return ToolResult(self.name, arguments, "invalid", "expression must be a text")
        try:
            return ToolResult(self.name, arguments, "success", show(evaluate(expression), self._digits))
        except CalculationError as error:
            return ToolResult(self.name, arguments, "failed", f"Error: {error}")
