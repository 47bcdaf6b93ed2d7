"""Every failure is classified once, where it crosses a boundary.

Invariant: a `Fault` names the boundary it crossed and its cause. What the infrastructure caused is retried, then masked
and counted; it never becomes a reward. A `UserError` is a mistake in what the user wrote or passed: one clear line,
exit code 2, nothing half-written.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from http.client import HTTPException, InvalidURL
from typing import Any, Literal

from recipe.dag.location import defined_at, raised_at, user_line

Cause = Literal["infrastructure", "user_code", "time_limit", "engine"]
"""infrastructure: another try may succeed. user_code: a bug in a hook, env, tool or reward function, which the same
input meets again. time_limit: such code took too long. engine: anything else."""


class UserError(Exception):
    """What is wrong, where, and how to mend it, in one line. Command line tools print it and exit with code 2."""


class Fault(Exception):
    """A failure inside one episode. `infra` faults are retried."""

    boundary = "episode"
    infra = False
    runs_user_code = False
    """Whether what is behind the boundary is the user's."""

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        infra: bool | None = None,
        time_limit: bool = False,
        source: str = "",
    ):
        """`where`: the node and function. `time_limit`: it had to be stopped. `source`: file:line of the user's
        code."""
        super().__init__(message)
        self.where, self.source = where, source
        self.time_limit = time_limit
        if infra is not None:
            self.infra = infra

    @property
    def cause(self) -> Cause:
        if self.infra:
            return "infrastructure"
        if self.time_limit:
            return "time_limit"
        return "user_code" if self.runs_user_code else "engine"

    def record(self) -> dict:
        """The JSON-able form that an episode record keeps."""
        return {
            "boundary": self.boundary,
            "infra": self.infra,
            "cause": self.cause,
            "where": self.where,
            "source": self.source,
            "message": str(self)[:2000],
        }


class ModelServerFault(Fault):
    """The policy's inference server failed, hung or answered nonsense."""

    boundary, infra = "model", True


class SandboxFault(Fault):
    """The sandbox could not run the code at all. Code that ran and failed is a result, not a fault."""

    boundary, infra = "sandbox", True


class ToolFault(Fault):
    """A tool's own implementation raised, or returned something that is no ToolResult."""

    boundary, infra, runs_user_code = "tool", False, True


class GraderFault(Fault):
    """The grader crashed or ran out of time."""

    boundary, infra = "grader", True


class HookFault(Fault):
    """A pre_process or post_process hook raised or returned something that is no prompt."""

    boundary, infra, runs_user_code = "hook", False, True


class EnvFault(Fault):
    """An environment raised, hung or returned something that is no (obs, reward, done)."""

    boundary, infra, runs_user_code = "env", False, True


class RewardFault(Fault):
    """A reward function raised or returned a value that is not finite."""

    boundary, infra, runs_user_code = "reward", False, True


class TimeoutFault(Fault):
    """A call or an episode outlived its limit."""

    boundary, infra = "timeout", True


_TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        *("EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOSPC", "EDQUOT", "EIO", "ESTALE", "EBUSY", "EADDRINUSE"),
        *("ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE", "ETIMEDOUT", "EADDRNOTAVAIL", "ENOBUFS"),
        *("ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ESHUTDOWN"),
    )
)
"""What the system says of exhaustion and of the network. A missing file or permission is the user's to fix."""
_LOST = (ConnectionError, TimeoutError, MemoryError, EOFError, HTTPException, socket.gaierror)
_LOST += (BrokenExecutor, subprocess.TimeoutExpired)
"""A connection, a limit of the code's own, memory, or another process."""
_BUGS = (NameError, AttributeError, TypeError, LookupError, AssertionError)
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Of HTTP: the server failed or is overloaded. A refused request (400, 401, 404) would be refused again."""
_TRANSPORT = frozenset(
    {
        *(("httpx", "TransportError"), ("httpcore", "NetworkError"), ("httpcore", "TimeoutException")),
        *(("httpcore", "ProtocolError"), ("requests", "ConnectionError"), ("requests", "Timeout")),
        *(("requests", "ChunkedEncodingError"), ("urllib3", "HTTPError"), ("aiohttp", "ClientConnectionError")),
        *(("aiohttp", "ClientPayloadError"), ("openai", "APIConnectionError"), ("anthropic", "APIConnectionError")),
        *(("grpc", "RpcError"), ("websockets", "ConnectionClosed"), ("redis", "ConnectionError")),
        *(("ray", "RayActorError"), ("ray", "RaySystemError"), ("torch", "OutOfMemoryError")),
    }
)
"""Top-level module and name of other libraries' base classes, so that none has to be installed or imported."""


def is_infrastructure(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that another try may succeed: a connection, a time-out of the
    code's own, exhausted descriptors, memory, threads or disk, an HTTP answer of an overloaded server."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if _is_transient(current):
            return True
        seen.add(id(current))
        # A bug in the code that handles an error of the infrastructure is a bug.
        hidden = current.__suppress_context__ or isinstance(current, _BUGS)
        current = current.__cause__ or (None if hidden else current.__context__)
    return False


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, Fault):
        return error.infra
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_infrastructure, error.exceptions))
    if isinstance(error, _LOST):
        return not isinstance(error, InvalidURL)
    if isinstance(error, OSError) and error.errno in _TRANSIENT:
        return True
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return True
    if any((cls.__module__.partition(".")[0], cls.__name__) in _TRANSPORT for cls in type(error).__mro__):
        return True
    answers = (error, getattr(error, "response", None))
    return any(_status(answer) in _TRANSIENT_STATUS for answer in answers)


def _status(answer: object) -> int | None:
    """httpx, requests and openai call it status_code, aiohttp status, urllib code."""
    values = (getattr(answer, name, None) for name in ("status_code", "status", "code"))
    return next((value for value in values if isinstance(value, int)), None)


@contextmanager
def boundary(fault: type[Fault], where: str = "", function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Turn anything that escapes into `fault`, keeping faults that are already classified and cancellation. A fault
    that does not say where it happened gets this `where`; what `is_infrastructure` is an `infra` fault whatever the
    boundary. A bug is located at the line of the user's code that raised, or at `function` if it returned something
    wrong."""
    try:
        yield
    except Fault as classified:
        classified.where = classified.where or where
        if not classified.infra and not classified.time_limit:
            classified.source = classified.source or user_line(classified) or defined_at(function)
        raise
    except (UserError, asyncio.CancelledError):
        raise
    except Exception as error:
        infra = True if is_infrastructure(error) else None
        # asyncio's own time-outs say nothing, and the built-in one is better known than its name here.
        text = f"timed out {error}".strip() if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        raise fault(text, where=where, infra=infra, source=raised_at(error)) from error


def described(value: object) -> str:
    """What user code returned, short enough for a message."""
    return f"{type(value).__name__} {value!r}"[:200]
