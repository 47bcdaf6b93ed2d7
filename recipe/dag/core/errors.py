"""Classification of failures: once each, at the boundary that they cross.

Invariant: a `Fault` names the boundary that it crossed and its cause. Faults of the infrastructure are retried, then
masked and counted; they never become a reward. A `UserError` is a mistake in the user's files or arguments: one clear
line, exit code 2, nothing half-written. The text of both is printable, whatever a server or a model put into it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from http.client import HTTPException, InvalidURL
from typing import Any, Literal

from recipe.dag.core.location import defined_at, raised_at, user_line
from recipe.dag.core.printable import printable

Cause = Literal["infrastructure", "user_code", "time_limit", "unrepeated", "engine"]
"""infrastructure: a retry may succeed. user_code: a bug in a hook, env, tool or reward function, which would recur with
the same input. time_limit: such code took too long. unrepeated: a fork (`counterfactual`) that got another
context. engine: anything else."""


class UserError(Exception):
    """A mistake of the user: what is wrong, where, and how to fix it, in one line. A command exits with 2."""

    def __str__(self) -> str:
        return printable(super().__str__())


def raise_all(messages: Iterable[str]) -> None:
    """Raise one UserError with a line for each of the messages, if there are any."""
    if lines := list(dict.fromkeys(messages)):
        raise UserError("\nerror: ".join(lines))


class Fault(Exception):
    """A failure inside one episode. `infra` faults are retried."""

    boundary = "episode"
    infra = False
    runs_user_code = False
    """True if the code behind the boundary is the user's."""

    def __init__(
        self, message: str, *, where: str = "", infra: bool | None = None, time_limit: bool = False, source: str = ""
    ):
        """`where`: node and function. `time_limit`: the code exceeded its time limit. `source`: file:line in the user's
        code."""
        super().__init__(message)
        self.where, self.source = where, source
        self.time_limit = time_limit
        if infra is not None:
            self.infra = infra

    def __str__(self) -> str:
        return printable(super().__str__())

    @property
    def cause(self) -> Cause:
        if self.infra:
            return "infrastructure"
        if self.time_limit:
            return "time_limit"
        return "user_code" if self.runs_user_code else "engine"

    def record(self) -> dict:
        """Return the JSON-compatible form for an episode's record."""
        return {
            "boundary": self.boundary,
            "infra": self.infra,
            "cause": self.cause,
            "where": printable(self.where),
            "source": self.source,
            "message": str(self)[:2000],
        }


class ModelServerFault(Fault):
    """The policy's inference server failed, hung or returned an invalid response."""

    boundary, infra = "model", True


class Refused(ModelServerFault):
    """The server refuses this very request (400, 413, 422), and would again."""

    infra = False


class PromptTooLong(Refused):
    """The prompt, or the prompt with the wanted completion, does not fit into the model's context."""

    room: int | None = None
    """Tokens that the context leaves for a completion, if the server's message says so."""


class SandboxFault(Fault):
    """The sandbox could not run the code at all. Code that ran and failed is a result, not a fault."""

    boundary, infra = "sandbox", True


class ToolFault(Fault):
    """A tool's implementation raised, or returned something other than a ToolResult."""

    boundary, infra, runs_user_code = "tool", False, True


class GraderFault(Fault):
    """The grader crashed or ran out of time."""

    boundary, infra = "grader", True


class HookFault(Fault):
    """An agent's `prompt` or `parse` raised, or returned something invalid."""

    boundary, infra, runs_user_code = "hook", False, True


class SkipCall(Fault):
    """Raised by the `prompt` of an agent whose policy is not trained: there is nothing to ask the model. The call is
    recorded as failed, with the text as the reason, and the episode goes on."""

    boundary, infra, runs_user_code = "hook", False, True


class EnvFault(Fault):
    """An environment raised, hung or returned something other than (obs, reward, done)."""

    boundary, infra, runs_user_code = "env", False, True


class RewardFault(Fault):
    """A reward function raised or returned a value that is not finite."""

    boundary, infra, runs_user_code = "reward", False, True


class ForkFault(Fault):
    """A fork in training has another context than the answer that it is compared with. A retry would differ, too."""

    boundary, infra = "fork", False

    @property
    def cause(self) -> Cause:
        return "unrepeated"


class TimeoutFault(Fault):
    """A call or an episode exceeded its time limit."""

    boundary, infra = "timeout", True


_TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        "EMFILE ENFILE ENOMEM EAGAIN ENOSPC EDQUOT EIO ESTALE EBUSY EADDRINUSE ECONNREFUSED ECONNRESET ECONNABORTED "
        "EPIPE ETIMEDOUT EADDRNOTAVAIL ENOBUFS ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH ENOTCONN ESHUTDOWN"
    ).split()
)
"""System errors for exhausted resources and for the network. The user has to fix a missing file or permission."""
_LOST = (ConnectionError, TimeoutError, MemoryError, EOFError, HTTPException, socket.gaierror)
_LOST += (BrokenExecutor, subprocess.TimeoutExpired)
"""Exceptions for lost connections, the code's own time-outs, memory, and other processes."""
_BUGS = (NameError, AttributeError, TypeError, LookupError, AssertionError)
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP: the server failed or is overloaded. A rejected request (400, 401, 404) would be rejected again."""
_TRANSPORT = frozenset(
    (
        "httpx.TransportError httpcore.NetworkError httpcore.TimeoutException httpcore.ProtocolError "
        "requests.ConnectionError requests.Timeout requests.ChunkedEncodingError urllib3.HTTPError "
        "aiohttp.ClientConnectionError aiohttp.ClientPayloadError openai.APIConnectionError "
        "anthropic.APIConnectionError grpc.RpcError websockets.ConnectionClosed redis.ConnectionError "
        "ray.RayActorError ray.RaySystemError torch.OutOfMemoryError"
    ).split()
)
"""Base classes of other libraries, by top-level module and name, so that none has to be installed or imported."""


def is_infrastructure(error: BaseException) -> bool:
    """Return True if a retry may succeed after `error`, or after the error that it was raised from: connections, the
    code's own time-outs, exhausted descriptors, memory, threads or disk, and HTTP responses of overloaded servers."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if _is_transient(current):
            return True
        seen.add(id(current))
        # a bug in code that handles an infrastructure error is still a bug
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
    if any(f"{cls.__module__.partition('.')[0]}.{cls.__name__}" in _TRANSPORT for cls in type(error).__mro__):
        return True
    responses = (error, getattr(error, "response", None))
    return any(_status(response) in _TRANSIENT_STATUS for response in responses)


def _status(response: object) -> int | None:
    """Return the HTTP status: httpx, requests and openai call it status_code, aiohttp status, urllib code."""
    values = (getattr(response, name, None) for name in ("status_code", "status", "code"))
    return next((value for value in values if isinstance(value, int)), None)


@contextmanager
def writing(path: object, advice: str = "") -> Iterator[None]:
    """Turn an OSError into a UserError that `path` cannot be written, which ends with `advice`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}{advice}") from error


@contextmanager
def boundary(fault: type[Fault], where: str = "", function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Turn every exception that escapes into `fault`, except classified faults, user errors and cancellation.

    A fault without a `where` gets this one. An error that `is_infrastructure` becomes an `infra` fault at any boundary.
    A bug is located at the line of the user's code that raised, or at `function` if that returned something invalid.
    """
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
        # asyncio's time-outs have no text, and the name of the exception class adds nothing
        text = f"timed out {error}".strip() if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        raise fault(text, where=where, infra=infra, source=raised_at(error)) from error


def described(value: object) -> str:
    """Return type and repr of a value that user code returned, short enough for a message."""
    return f"{type(value).__name__} {value!r}"[:200]
