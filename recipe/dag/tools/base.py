"""The base class of built-in tools.

Invariant: its attributes belong to the class, so that a workflow is checked without making the tool.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from recipe.dag.core.frozen import Frozen
from recipe.dag.types.tool import Tool

if TYPE_CHECKING:
    from recipe.dag.tools.sandbox_client import SandboxClient


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's schema of a function."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a run gives its built-in tools."""

    base: str
    """The workflow file: paths in options are relative to its folder, then to the project's root."""
    sandbox: SandboxClient | None = None
    """Not None for a tool that `needs_sandbox`."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """The run's limits of programs, which apply where the options name none."""
    shared: dict[str, Any] = field(default_factory=dict)
    """What several tools use together, such as a connection."""
    online: bool = True
    """False where no episode counts, as in `validate --play`: a tool that asks a server answers without it."""


class BuiltinTool(Tool):
    Options: ClassVar[type[Frozen]]
    """The class that checks its `kwargs` in a workflow. Mark.UNLEARNED are those that decide how a server is asked, not
    what it answers."""
    remembers: ClassVar[bool] = False
    """Whether a call can see earlier calls of the same episode."""
    needs_sandbox: ClassVar[bool] = False
    parameters: ClassVar[dict[str, Any]]
    """The JSON schema of its arguments."""
    several: ClassVar[bool] = False
    """Whether it is a placeholder of all tools of a server until a run starts."""

    @classmethod
    @abstractmethod
    def make(cls, options: Any, resources: Resources) -> Tool:
        """Return the tool. `options`: an `Options`. Raises UserError."""

    @classmethod
    def problems(cls, options: Any, base: str) -> Iterator[tuple[str, str]]:
        """Yield (option, message) for what is wrong with valid `options`, without starting anything. `base`: as in
        `Resources`. The option is empty if one is missing."""
        return iter(())

    @classmethod
    def shown_as(cls, kwargs: Mapping[str, Any]) -> str:
        """Return the name by which models call the tool with these options."""
        return cls.name

    async def check(self) -> str:
        """Ask the server of the tool, and return what it said in a few words; "" for a tool without one. Raises
        UserError if it cannot be used."""
        return ""
