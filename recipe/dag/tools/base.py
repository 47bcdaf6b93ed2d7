"""The base class of built-in tools.

Invariant: its attributes belong to the class, so that a workflow is checked without making the tool.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from recipe.dag.types.frozen import Frozen
from recipe.dag.types.tool import Tool

if TYPE_CHECKING:
    from recipe.dag.tools.sandbox_client import SandboxClient


class BuiltinTool(Tool):
    Options: ClassVar[type[Frozen]]
    """The class that checks its `kwargs` in a workflow."""
    remembers: ClassVar[bool] = False
    """Whether a call can see earlier calls of the same episode."""
    needs_sandbox: ClassVar[bool] = False
    parameters: ClassVar[dict[str, Any]]
    """The JSON schema of its arguments."""

    @classmethod
    @abstractmethod
    def make(cls, options: Any, sandbox: SandboxClient | None, limits: Mapping[str, float]) -> Tool:
        """Return the tool. `options`: an `Options`; `sandbox`: not None if `needs_sandbox`; `limits`: the run's limits
        of programs, which apply where the options name none."""
