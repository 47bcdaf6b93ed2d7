"""The engine of verl-dag: nothing in this package knows a task.

What users write against can be imported from here: `from recipe.dag import Agent, Context, Output`. Each name is loaded
when it is first asked for, so importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe.dag.core.errors import Fault, SkipCall, UserError
    from recipe.dag.types.agent import Agent
    from recipe.dag.types.context import Context, Message, Output
    from recipe.dag.types.env import Env
    from recipe.dag.types.record import Call, Episode, ToolResult
    from recipe.dag.types.scorer import Scorer
    from recipe.dag.types.tool import Tool

__version__ = "0.2.0"
__all__ = [
    "Agent",
    "Call",
    "Context",
    "Env",
    "Episode",
    "Fault",
    "Message",
    "Output",
    "Scorer",
    "SkipCall",
    "Tool",
    "ToolResult",
    "UserError",
]
_MODULES = {
    "Agent": "types.agent",
    "Call": "types.record",
    "Context": "types.context",
    "Env": "types.env",
    "Episode": "types.record",
    "Fault": "core.errors",
    "Message": "types.context",
    "Output": "types.context",
    "Scorer": "types.scorer",
    "SkipCall": "core.errors",
    "Tool": "types.tool",
    "ToolResult": "types.record",
    "UserError": "core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
