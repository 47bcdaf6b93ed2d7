"""The result of a program, the same for every engine.

Invariant: a program that ran, however badly, yields an `Execution`; `SandboxError` means that it never ran, or that the
server or its zygote ended meanwhile, and is never caused by the program; `Unavailable` means that this machine cannot
run an engine at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LANGUAGES = ("python", "pytest", "bash", "cpp")


class Unavailable(Exception):
    """An engine cannot run on this machine. The message says why and how to fix it, in one line."""


class SandboxError(Exception):
    """The job could not be set up, or its jail broke. The message says what is missing or wrong; the job's code is not
    the cause."""


class UnusableSession(SandboxError):
    """The job's files could not be written to its session, as earlier programs left it."""


@dataclass(frozen=True)
class Outcome:
    """The result of one process. `return_code` is negative after a signal and None after a time-out."""

    status: str
    """finished | timeout"""
    return_code: int | None
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class Execution:
    """The result of a job. `compile` is None for languages without a compiler, `run` if compiling failed. `files` are
    base64 by name."""

    run: Outcome | None
    compile: Outcome | None = None
    files: dict[str, str] = field(default_factory=dict)
