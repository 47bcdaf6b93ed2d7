"""The tools that workflows name without a path.

Invariant: a tool's class declares everything that the engine needs to know: its name, its options with their checks,
whether it remembers anything between calls, whether it needs the sandbox. A new tool is a module here and its class in
`BUILTIN`. Importing this needs neither torch nor an HTTP client, since `validate` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe.dag.tools.base import BuiltinTool, Resources
from recipe.dag.tools.calculator import Calculator
from recipe.dag.tools.code_interpreter import CodeInterpreter
from recipe.dag.tools.mcp import Mcp
from recipe.dag.tools.search import Search
from recipe.dag.types.tool import Tool

BUILTIN: Mapping[str, type[BuiltinTool]] = {
    "code_interpreter": CodeInterpreter,
    "calculator": Calculator,
    "search": Search,
    "mcp": Mcp,
}


def make_builtin(name: str, kwargs: Mapping[str, Any], resources: Resources) -> Tool:
    """Raises UserError."""
    tool = BUILTIN[name]
    return tool.make(tool.Options(**kwargs), resources)
