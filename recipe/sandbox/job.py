"""A program to run, with everything that an engine needs to know about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recipe.sandbox.limits import Limits
from recipe.sandbox.places import Place


@dataclass(frozen=True)
class Job:
    code: str
    language: str = "python"
    timeout_s: float = 10.0
    compile_timeout_s: float = 10.0
    stdin: str | None = None
    args: Sequence[str] = ()
    """Arguments of pytest."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Base64 contents by relative name; None is skipped."""
    fetch: Sequence[str] = ()
    """Names and patterns of the files to return."""
    limits: Limits = Limits()
    work: Place | None = None
    """The session that is its working directory, writable; None: a fresh directory."""
    shares: Mapping[str, Place] = field(default_factory=dict)
    """Sessions to see read-only at /in/NAME."""
