"""A client that runs code on a SandboxFusion-compatible server, and keeps files in sessions of this project's server.

Invariant: `run_code` returns the result of the code, including failures and time-outs, or raises SandboxFault if the
sandbox could not run it at all, after a bounded number of tries. Neither is ever mistaken for the other. A program that
may have run in a session is not sent again, since it may have changed files there.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential
from yarl import URL

from recipe.dag.errors import SandboxFault, UserError
from recipe.dag.tools.sandbox_http import authorization, http_root, open_http, split

logger = logging.getLogger(__name__)

_COMPILE_S = 20.0
_RETRIED = (429, 500, 502, 503, 504)
_NOT_BEGUN = (429, 503, 504)
"""Of these: the server has not begun what was asked."""
_MAX_PAUSE_S = 5.0
_PART_BYTES = 16 << 20
"""A larger file is sent in parts: the server takes bodies of at most 32 MiB."""
_BEATS = 4
"""How often the sessions are renewed within their time to live."""
_CANCELLED_S = 2.0
"""How long a cancelled caller waits for the session that it asked for, to delete it."""
_NO_SESSION = "no such session"
"""How the server's answer about a session that it does not have begins."""
T = TypeVar("T")
_NAMES = (
    (aiohttp.ConnectionTimeoutError, "ConnectTimeout"),
    (aiohttp.ServerTimeoutError, "ReadTimeout"),
    (aiohttp.ClientConnectorError, "ConnectError"),
)
"""Names of aiohttp's errors in a fault's message; other errors keep their own."""


@dataclass(frozen=True)
class RunResult:
    """The result of a program. `seconds` is its running time as measured by the server; `attempts` above 1 mean that
    the sandbox failed before."""

    status: str
    """success | failed | timeout"""
    stdout: str
    stderr: str
    return_code: int | None
    seconds: float
    attempts: int
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The files that `fetch` asked for, by name."""


class FileRefused(Exception):
    """A session's file cannot be read or written: its name is invalid, it does not exist, is not a regular file, or is
    too large. The message is the reason."""


class SessionFull(FileRefused):
    """The files of a session have used up its quota."""


@dataclass(frozen=True)
class SessionFiles:
    """The regular files of a session."""

    sizes: Mapping[str, int]
    """Bytes by name."""
    modified: Mapping[str, float]
    """Seconds since the epoch by name."""
    used_bytes: int
    quota_bytes: int


class _Unavailable(Exception):
    """An infrastructure failure that is retried. unreachable: no answer came. begun: the server may have begun what was
    asked."""

    def __init__(self, message: str, *, unreachable: bool = False, begun: bool = False):
        super().__init__(message)
        self.unreachable, self.begun = unreachable, begun


@dataclass(frozen=True)
class _Request:
    """repeatable: whether a request that the server may have begun is sent again. max_bytes: of the answer."""

    method: str
    path: str
    sock_read_s: float
    content: bytes | None = None
    repeatable: bool = True
    max_bytes: int | None = None


@dataclass
class _Connection:
    """The state of one event loop."""

    http: aiohttp.ClientSession
    slots: asyncio.Semaphore
    recovery: asyncio.Task[None] | None = field(default=None)
    sessions: dict[str, float] = field(default_factory=dict)
    """Time to live of the sessions that this client opened, in seconds by identifier."""
    turns: dict[str, asyncio.Lock] = field(default_factory=dict)
    """By session: a program that waits at the server for another one is refused after half a minute."""
    heart: asyncio.Task[None] | None = field(default=None)


class SandboxClient:
    """At most `max_concurrent` requests at once, per event loop; further ones wait here.

    url: the server's, as `split` accepts it. token: None: the one in the URL, if any. margin_s: how long an answer may
    take beyond the program's time limit; a full server refuses a request after half a minute. retries: tries after the
    first.
    on_unreachable: awaited before the next try if the server cannot be reached or does not answer; concurrent failures
    share one call.
    """

    def __init__(
        self,
        url: str,
        *,
        max_concurrent: int = 64,
        connect_timeout_s: float = 5.0,
        margin_s: float = 40.0,
        retries: int = 4,
        on_unreachable: Callable[[], Awaitable[None]] | None = None,
        token: str | None = None,
    ):
        self.url, given = split(url)
        self._max_concurrent = max_concurrent
        self._connect_timeout_s = connect_timeout_s
        self._margin_s = margin_s
        self._retries = retries
        self._on_unreachable = on_unreachable
        self._headers = {"Content-Type": "application/json"} | authorization(token or given)
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] = (
            weakref.WeakKeyDictionary()
        )

    async def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        timeout_s: float = 20.0,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        memory_mb: int = 1024,
        session_id: str | None = None,
        share: Mapping[str, str] | None = None,
        fetch: Sequence[str] = (),
    ) -> RunResult:
        """Run one program, with `files` by relative name in its working directory. Raises SandboxFault, also if a
        session no longer exists.

        session_id: the session whose files are the working directory; one program at a time runs there, and a full
            session is a result. share: sessions to read at /in/NAME, by name; needs isolation `full`. fetch: names and
            patterns (`*.csv`, `out/**/*.png`) of the files to return, 16 MiB together at most.
        """
        try:
            code.encode()
        except UnicodeEncodeError as error:
            # Servers answer this with a 500, although the code is at fault.
            problem = f"SyntaxError: not valid UTF-8: lone surrogate at position {error.start}"
            return RunResult("failed", "", problem, 1, 0.0, 1)
        if language == "python" and "\0" in code:
            # Interpreters before 3.11.4 drop the rest of such a line and run the remaining code.
            return RunResult("failed", "", "SyntaxError: source code cannot contain null bytes", 1, 0.0, 1)
        body: dict[str, Any] = {
            "code": code,
            "language": language,
            "run_timeout": timeout_s,
            "compile_timeout": _COMPILE_S,
            "memory_limit_MB": memory_mb,
            "stdin": stdin.encode("utf-8", "replace").decode() if stdin is not None else None,
            "files": {name: base64.b64encode(data).decode() for name, data in (files or {}).items()},
        }
        # Only if asked for: SandboxFusion itself has neither sessions nor shares.
        optional = {"session_id": session_id, "share": share and dict(share), "fetch_files": list(fetch)}
        body |= {name: value for name, value in optional.items() if value}
        request = _Request(
            "POST", "/run_code", timeout_s + self._margin_s, json.dumps(body).encode(), repeatable=session_id is None
        )
        async with AsyncExitStack() as stack:
            if session_id is not None:
                turns = self._connection().turns
                await stack.enter_async_context(turns.setdefault(session_id, asyncio.Lock()))
            return await self._exchange(request, self._result)

    async def open_session(self, quota_mb: int = 256, ttl_s: float = 300.0) -> str:
        """Return the identifier of a new, empty session: a folder for programs, private to those who know the
        identifier. Raises SandboxFault, also if the server has too many sessions; UserError if it has none at all.

        The session lives until `delete`, and for `ttl_s` after this process, which renews it meanwhile, has ended.
        """
        opening = asyncio.ensure_future(self._open(quota_mb, ttl_s))
        try:
            session_id = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Otherwise a session that the server has just made would stay until its time is over.
            with suppress(Exception):
                await self.delete(await asyncio.wait_for(opening, _CANCELLED_S))
            raise
        connection = self._connection()
        connection.sessions[session_id] = ttl_s
        if connection.heart is None or connection.heart.done():
            connection.heart = asyncio.create_task(self._renew(connection))
        return session_id

    async def put(self, session_id: str, name: str, data: bytes) -> None:
        """Write a file into a session, with the folders that lead to it. Raises FileRefused, SessionFull, SandboxFault."""
        for start in range(0, max(len(data), 1), _PART_BYTES):
            query = f"?offset={start}" if start else ""
            part = data[start : start + _PART_BYTES]
            request = _Request("PUT", _file_path(session_id, name) + query, self._margin_s, part)
            await self._exchange(request, self._file_answer)

    async def get(self, session_id: str, name: str, max_bytes: int = 16 << 20) -> bytes:
        """Return a file of a session. Raises FileRefused, SandboxFault."""
        request = _Request("GET", _file_path(session_id, name), self._margin_s, max_bytes=max_bytes)
        return await self._exchange(request, self._file_answer)

    async def list(self, session_id: str, *patterns: str) -> SessionFiles:
        """Return the regular files of a session by name, at most 1000: all, or those that match a pattern (`*`, `?`,
        `[...]`, `**`). Raises SandboxFault."""
        query = "?" + urlencode([("match", pattern) for pattern in patterns]) if patterns else ""
        request = _Request("GET", f"/sessions/{quote(session_id, safe='')}/files{query}", self._margin_s)
        data = json.loads(await self._exchange(request, self._file_answer))
        files = {file["name"]: file for file in data["files"]}
        return SessionFiles(
            {name: int(file["bytes"]) for name, file in files.items()},
            {name: float(file["modified"]) for name, file in files.items()},
            int(data["used_bytes"]),
            int(data["quota_bytes"]),
        )

    async def delete(self, session_id: str, name: str | None = None) -> None:
        """Delete a session with its files, or one file or folder of it. A session that is gone already is no error.
        Raises FileRefused, SandboxFault."""
        if name is not None:
            await self._exchange(_Request("DELETE", _file_path(session_id, name), self._margin_s), self._file_answer)
            return
        connection = self._connection()
        connection.sessions.pop(session_id, None)
        connection.turns.pop(session_id, None)
        request = _Request("DELETE", f"/sessions/{quote(session_id, safe='')}", self._margin_s)
        await self._exchange(request, lambda status, body, attempt: None)

    async def ping(self) -> bool:
        """Return whether the server answers."""
        timeout = aiohttp.ClientTimeout(total=self._connect_timeout_s)
        request = self._connection().http.get(f"{http_root(self.url)}/v1/ping", headers=self._headers, timeout=timeout)
        try:
            async with request as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Close this event loop's connections. The client can be used again."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            for task in (connection.heart, connection.recovery):
                if task is not None:
                    task.cancel()
            await connection.http.close()

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = _Connection(open_http(self.url), asyncio.Semaphore(self._max_concurrent))
        return self._connections[loop]

    async def _exchange(self, request: _Request, read: Callable[[int, bytes, int], T]) -> T:
        """Send a request until `read` accepts the status, the body and the number of the try. Raises SandboxFault."""
        connection, attempt_number = self._connection(), 1

        def is_retried(error: BaseException) -> bool:
            return isinstance(error, _Unavailable) and (request.repeatable or not error.begun)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=wait_random_exponential(multiplier=0.5, max=_MAX_PAUSE_S),
            retry=retry_if_exception(is_retried),
            before_sleep=self._recover,
            reraise=True,
        )
        try:
            async with connection.slots:
                async for attempt in retrying:
                    with attempt:
                        attempt_number = attempt.retry_state.attempt_number
                        status, body = await self._send(connection.http, request)
                        return read(status, body, attempt_number)
        except _Unavailable as error:
            raise SandboxFault(f"{error} ({attempt_number} tries)", where=self.url) from error
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, http: aiohttp.ClientSession, request: _Request) -> tuple[int, bytes]:
        """Return the status and the body of one answer. Raises _Unavailable, FileRefused."""
        timeout = aiohttp.ClientTimeout(sock_connect=self._connect_timeout_s, sock_read=request.sock_read_s)
        try:
            async with http.request(
                request.method,
                # Encoded already: a name with `..` must reach the server as it is, which refuses it.
                URL(f"{http_root(self.url)}{request.path}", encoded=True),
                data=request.content,
                headers=self._headers,
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                if answer.status == 200 and (answer.content_length or 0) > (limit := request.max_bytes or 1 << 62):
                    raise FileRefused(f"it has {answer.content_length} bytes; at most {limit} are read")
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            name = next((name for kind, name in _NAMES if isinstance(error, kind)), type(error).__name__)
            begun = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise _Unavailable(f"{name}: {error}".rstrip(": "), unreachable=True, begun=begun) from error
        if status in _RETRIED:
            raise _Unavailable(f"HTTP {status}: {_text(body)[:200]}", begun=status not in _NOT_BEGUN)
        return status, body

    def _result(self, status: int, body: bytes, attempt: int) -> RunResult:
        if status == 507:  # the session is full: files have to be deleted first, by the program's author
            return RunResult("failed", "", f"[sandbox] {_detail(body)}", 1, 0.0, attempt)
        if status != 200:
            raise SandboxFault(f"HTTP {status}: {_text(body)[:500]}", where=self.url)
        try:
            return read_answer(json.loads(body), attempt)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"unreadable answer ({type(error).__name__}: {error}): {_text(body)[:200]}"
            raise _Unavailable(problem, begun=True) from error

    def _file_answer(self, status: int, body: bytes, attempt: int) -> bytes:
        """Return the body of the answer about a session's files. Raises FileRefused, SessionFull, SandboxFault."""
        if status < 300:
            return body
        detail = _detail(body)
        if status == 507:
            raise SessionFull(detail)
        if status in (400, 404, 409, 413) and not detail.startswith(_NO_SESSION):
            raise FileRefused(detail)
        raise SandboxFault(f"HTTP {status}: {detail[:500]}", where=self.url)

    async def _open(self, quota_mb: int, ttl_s: float) -> str:
        content = json.dumps({"quota_mb": quota_mb, "ttl": ttl_s, "keep": True}).encode()

        def read(status: int, body: bytes, attempt: int) -> str:
            if status in (404, 405):
                raise UserError(f"sandbox {self.url} has no sessions (HTTP {status}); start `verl-dag sandbox serve`")
            if status == 400:
                raise UserError(f"sandbox {self.url}: {_detail(body)}")
            if status != 201:
                raise SandboxFault(f"HTTP {status}: {_text(body)[:500]}", where=self.url)
            return json.loads(body)["id"]

        return await self._exchange(_Request("POST", "/sessions", self._margin_s, content), read)

    async def _renew(self, connection: _Connection) -> None:
        """Restart the time of all open sessions, again and again, until none is left."""
        while connection.sessions:
            await asyncio.sleep(min(connection.sessions.values()) / _BEATS)
            content = json.dumps({"ids": [*connection.sessions]}).encode()
            try:
                await self._send(connection.http, _Request("POST", "/sessions/renew", self._margin_s, content))
            except _Unavailable as error:
                # The next use of a session that is lost fails.
                logger.warning("sandbox %s: sessions could not be renewed: %s", self.url, error)

    async def _recover(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if self._on_unreachable is None or not isinstance(error, _Unavailable) or not error.unreachable:
            return
        connection = self._connection()
        if connection.recovery is None or connection.recovery.done():
            connection.recovery = asyncio.create_task(self._run_recovery(self._on_unreachable))
        await asyncio.shield(connection.recovery)

    async def _run_recovery(self, on_unreachable: Callable[[], Awaitable[None]]) -> None:
        try:
            await on_unreachable()
        except (SandboxFault, OSError) as error:
            # Not raised: the next try fails if the server is still unreachable.
            logger.warning("sandbox %s could not be restarted: %s", self.url, error)


def read_answer(data: Any, attempts: int) -> RunResult:
    """Return the result in a /run_code answer. Raises _Unavailable for SandboxError; KeyError, TypeError, ValueError or
    AttributeError for a malformed answer."""
    status, compiled, run = data["status"], data.get("compile_result"), data.get("run_result")
    if status == "SandboxError":
        # The end of the message: the reason follows the program itself.
        raise _Unavailable(f"SandboxError: {str(data.get('message'))[-500:]}")
    last = run or compiled
    if status not in ("Success", "Failed") or last["status"] not in ("Finished", "TimeLimitExceeded"):
        raise ValueError(f"status {status!r}")
    timed_out = last["status"] == "TimeLimitExceeded"
    if not timed_out and not isinstance(last["return_code"], int):
        raise ValueError(f"return_code {last['return_code']!r}")
    outcome = "success" if status == "Success" else "timeout" if timed_out else "failed"
    # Lone surrogates would break the tokenizer later. A value that is not a string raises AttributeError.
    stdout, stderr = ((last.get(name) or "").encode("utf-8", "replace").decode() for name in ("stdout", "stderr"))
    seconds = float(last.get("execution_time") or 0.0)
    files = {name: base64.b64decode(content) for name, content in (data.get("files") or {}).items()}
    return RunResult(outcome, stdout, stderr, last.get("return_code"), seconds, attempts, files)


def _file_path(session_id: str, name: str) -> str:
    """Return the path of a file's URL. Raises FileRefused for a name that leads out of the session, which URLs hide."""
    if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise FileRefused(f"{name[:200]!r} is not a relative name inside the session")
    try:
        return f"/sessions/{quote(session_id, safe='')}/files/{quote(name)}"
    except UnicodeEncodeError:
        raise FileRefused(f"{name[:200]!r} is not valid Unicode") from None


def _detail(body: bytes) -> str:
    """Return the reason in the body of an answer that is an error."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, TypeError, KeyError):
        return _text(body)


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace")


async def check_sandbox(url: str, *, token: str | None = None, timeout_s: float = 10.0) -> None:
    """Raise UserError unless a sandbox answers at `url`."""
    root, given = split(url)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            open_http(root, headers=authorization(token or given), timeout=timeout) as http,
            http.get(f"{http_root(root)}/v1/ping", allow_redirects=False) as answer,
        ):
            problem = "" if answer.status == 200 else f"HTTP {answer.status} to /v1/ping"
    except (aiohttp.ClientError, OSError, ValueError) as error:  # yarl raises ValueError for a bad URL
        problem = str(error) or type(error).__name__
    if problem:
        raise UserError(
            f"sandbox {root} does not answer ({problem}); start it, or drop sandbox.url to use the local one"
        )
