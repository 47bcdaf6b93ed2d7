"""Every failure is classified once, where it crosses a boundary.

Invariant: a `Fault` names the boundary it crossed and whether the infrastructure is to blame. An infrastructure fault
is retried, then masked and counted; it never becomes a reward. A `UserError` is a mistake in what the user wrote or
passed: one clear line, exit code 2, nothing half-written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """What is wrong, where, and how to mend it, in one line. Command line tools print it and exit with code 2."""


class Fault(Exception):
    """A failure inside one episode. `infra` faults are retried; the others are data about the user's code or the
    model."""

    boundary = "episode"
    infra = False

    def __init__(self, message: str, *, where: str = "", infra: bool | None = None):
        super().__init__(message)
        self.where = where
        if infra is not None:
            self.infra = infra

    def record(self) -> dict:
        """The JSON-able form that an episode record keeps."""
        return {"boundary": self.boundary, "infra": self.infra, "where": self.where, "message": str(self)[:2000]}


class ModelServerFault(Fault):
    """The policy's inference server failed, hung or answered nonsense."""

    boundary, infra = "model", True


class SandboxFault(Fault):
    """The sandbox could not run the code at all. Code that ran and failed is a result, not a fault."""

    boundary, infra = "sandbox", True


class ToolFault(Fault):
    """A tool's own implementation raised."""

    boundary, infra = "tool", True


class GraderFault(Fault):
    """The grader crashed or ran out of time."""

    boundary, infra = "grader", True


class HookFault(Fault):
    """A pre_process or post_process hook raised or returned something that is no prompt."""

    boundary, infra = "hook", False


class EnvFault(Fault):
    """An environment raised, hung or returned something that is no (obs, reward, done)."""

    boundary, infra = "env", False


class RewardFault(Fault):
    """A reward function raised or returned a value that is not finite."""

    boundary, infra = "reward", False


class TimeoutFault(Fault):
    """A call or an episode outlived its limit."""

    boundary, infra = "timeout", True


@contextmanager
def boundary(fault: type[Fault], where: str = "") -> Iterator[None]:
    """Turn anything that escapes into `fault`, keeping faults that are already classified and cancellation. A fault
    that does not say where it happened gets this `where`."""
    try:
        yield
    except Fault as classified:
        classified.where = classified.where or where
        raise
    except (UserError, asyncio.CancelledError):
        raise
    except TimeoutError as error:
        raise fault(f"timed out {error}".strip(), where=where) from error
    except Exception as error:
        raise fault(f"{type(error).__name__}: {error}", where=where) from error


def described(value: object) -> str:
    """What user code returned, short enough for a message."""
    return f"{type(value).__name__} {value!r}"[:200]
