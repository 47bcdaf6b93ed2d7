"""The engine of verl-dag: nothing in this package knows a task.

What users write against can be imported from here: `from recipe.dag import Agent, Context, Output`. Each name is loaded
when it is first asked for, so importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe.dag.episode.agent import Agent
    from recipe.dag.episode.context import Context, Message, Output
    from recipe.dag.episode.env import Env
    from recipe.dag.episode.record import Call, Episode, ToolResult
    from recipe.dag.errors import Fault, UserError
    from recipe.dag.tools.tool import Tool

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
    "Tool",
    "ToolResult",
    "UserError",
]
_MODULES = {
    "Agent": "episode.agent",
    "Call": "episode.record",
    "Context": "episode.context",
    "Env": "episode.env",
    "Episode": "episode.record",
    "Fault": "errors",
    "Message": "episode.context",
    "Output": "episode.context",
    "Tool": "tools.tool",
    "ToolResult": "episode.record",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
