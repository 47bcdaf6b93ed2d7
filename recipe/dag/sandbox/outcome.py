"""What came of a program, whichever engine ran it.

Invariant: a program that ran, however badly, is an `Execution`; `SandboxError` means that it never ran, or that its
jail broke, and is never the program's own doing; `Unavailable` means that this machine cannot run an engine at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.dag.sandbox.workspace import SandboxError

__all__ = ["LANGUAGES", "Execution", "Outcome", "SandboxError", "Unavailable"]

LANGUAGES = ("python", "bash", "cpp")


class Unavailable(Exception):
    """Why an engine cannot run on this machine, and how to mend it, in one line."""


@dataclass(frozen=True)
class Outcome:
    """One process, run to its end. `return_code` is negative after a signal and None after a time-out."""

    status: str
    """finished | timeout"""
    return_code: int | None
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class Execution:
    """`compile` is None for languages without a compiler, `run` when compiling failed. `files`: base64 by name."""

    run: Outcome | None
    compile: Outcome | None = None
    files: dict[str, str] = field(default_factory=dict)
