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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.core.http import Answer, Unavailable
from recipe.dag.core.per_loop import PerLoop
from recipe.dag.tools.sandbox_transport import Request, TooLarge, Transport

logger = logging.getLogger(__name__)

_COMPILE_S = 20.0
_PART_BYTES = 16 << 20
"""A larger file is sent in parts: the server takes bodies of at most 32 MiB."""
_BEATS = 4
"""How often the sessions are renewed within their time to live."""
_CANCELLED_S = 2.0
"""How long a cancelled caller waits for the session that it asked for, to delete it."""
_NO_SESSION = "no such session"
"""How the server's answer about a session that it does not have begins."""
T = TypeVar("T")


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
    full: bool = False
    """Whether it can hold no more bytes, or no more files."""


@dataclass
class _Sessions:
    """The sessions that are used on one event loop."""

    opened: dict[str, float] = field(default_factory=dict)
    """Time to live in seconds by identifier, of those that this client opened and no call has used yet."""
    renewed: dict[str, float] = field(default_factory=dict)
    """The same of those in use. One that is never used is never renewed: its identifier did not reach its caller."""
    turns: dict[str, asyncio.Lock] = field(default_factory=dict)
    """By identifier: a program that waits at the server for another one is refused after half a minute."""
    heart: asyncio.Task[None] | None = None
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    """Wakes the heart: the session that is used for the first time may live shorter than all others."""


class SandboxClient:
    """Runs programs and keeps files at one server."""

    def __init__(self, url: str, *, margin_s: float = 40.0, **options: Any):
        """`margin_s`: how long an answer may take beyond the program's time limit; a full server refuses a request
        after half a minute. `options`: Transport's."""
        self.transport = Transport(url, **options)
        self._margin_s = margin_s
        self._sessions = PerLoop(_Sessions)

    @property
    def url(self) -> str:
        return self.transport.url

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
        content = json.dumps(body).encode()
        request = Request("POST", "/run_code", timeout_s + self._margin_s, content, repeatable=session_id is None)
        async with AsyncExitStack() as stack:
            if session_id is not None:
                turns = self._use(session_id).turns
                await stack.enter_async_context(turns.setdefault(session_id, asyncio.Lock()))
            return await self.transport.exchange(request, self._result)

    async def open_session(self, quota_mb: int = 256, ttl_s: float = 300.0) -> str:
        """Return the identifier of a new, empty session: a folder for programs, private to those who know the
        identifier. Raises SandboxFault, also if the server has too many sessions; UserError if it has none at all.

        The session lives until `delete`, and for `ttl_s` after this process, which renews it meanwhile, has ended.
        """
        content = json.dumps({"quota_mb": quota_mb, "ttl": ttl_s, "keep": True}).encode()
        request = Request("POST", "/sessions", self._margin_s, content)
        opening = asyncio.ensure_future(self.transport.exchange(request, self._session_id))
        try:
            session_id = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Otherwise a session that the server has just made would stay until its time is over.
            with suppress(Exception):
                await self.delete(await asyncio.wait_for(opening, _CANCELLED_S))
            raise
        self._sessions.get().opened[session_id] = ttl_s
        return session_id

    async def put(self, session_id: str, name: str, data: bytes) -> None:
        """Write a file into a session, with the folders that lead to it. Raises FileRefused (SessionFull if the quota
        is used up), SandboxFault."""
        for start in range(0, max(len(data), 1), _PART_BYTES):
            query = f"?offset={start}" if start else ""
            await self._on_file("PUT", session_id, name, query, content=data[start : start + _PART_BYTES])

    async def get(self, session_id: str, name: str, max_bytes: int = 16 << 20) -> bytes:
        """Return a file of a session. Raises FileRefused, SandboxFault."""
        try:
            return await self._on_file("GET", session_id, name, max_bytes=max_bytes)
        except TooLarge as error:
            raise FileRefused(str(error)) from None

    async def list(self, session_id: str, *patterns: str) -> SessionFiles:
        """Return the regular files of a session by name, at most 1000: all, or those that match a pattern (`*`, `?`,
        `[...]`, `**`). Raises SandboxFault."""
        query = "?" + urlencode([("match", pattern) for pattern in patterns]) if patterns else ""
        request = Request("GET", f"{_path(session_id)}/files{query}", self._margin_s)
        return await self._on_session(session_id, request, _files, "listed")

    async def settle(self, session_id: str) -> Sequence[str]:
        """Remove what was added or changed in a session since the last call while it holds more than its quota; return
        the names, at most 1000. What is left is safe from the next call. Raises SandboxFault.

        Only below isolation `full` a session can hold more, and no program runs there until it no longer does.
        """
        request = Request("POST", f"{_path(session_id)}/settle", self._margin_s)
        return await self._on_session(session_id, request, _removed, "settled")

    async def delete(self, session_id: str, name: str | None = None) -> None:
        """Delete a session with its files, or one file or folder of it. A session that is gone already is no error.
        Raises FileRefused, SandboxFault."""
        if name is not None:
            await self._on_file("DELETE", session_id, name)
            return
        sessions = self._sessions.get()
        for kept in (sessions.opened, sessions.renewed, sessions.turns):
            kept.pop(session_id, None)
        await self.transport.exchange(Request("DELETE", _path(session_id), self._margin_s), lambda answer: None)

    async def ping(self) -> bool:
        """Return whether the server answers."""
        return not await self.transport.ping()

    async def close(self) -> None:
        """Close this event loop's connections. The client can be used again; its sessions are no longer renewed."""
        sessions = self._sessions.pop()
        if sessions is not None and sessions.heart is not None:
            sessions.heart.cancel()
        await self.transport.close()

    def _use(self, session_id: str) -> _Sessions:
        """Renew the session from now on, if this client opened it."""
        sessions = self._sessions.get()
        if session_id in sessions.opened:
            sessions.renewed[session_id] = sessions.opened.pop(session_id)
            sessions.joined.set()
            if sessions.heart is None or sessions.heart.done():
                sessions.heart = asyncio.create_task(self._renew(sessions))
        return sessions

    async def _renew(self, sessions: _Sessions) -> None:
        """Restart the time of all open sessions, again and again, until none is left."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while sessions.renewed:
            sessions.joined.clear()
            left_s = last + min(sessions.renewed.values()) / _BEATS - loop.time()
            if left_s > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(sessions.joined.wait(), left_s)
                continue
            content = json.dumps({"ids": [*sessions.renewed]}).encode()
            try:
                await self.transport.send(Request("POST", "/sessions/renew", self._margin_s, content))
            except Unavailable as error:
                # The next use of a session that is lost fails.
                logger.warning("sandbox %s: sessions could not be renewed: %s", self.url, error)
            last = loop.time()

    async def _on_session(self, session_id: str, request: Request, read: Callable[[bytes], T], done: str) -> T:
        self._use(session_id)
        try:
            return await self.transport.exchange(request, lambda answer: read(self._checked(answer)))
        except FileRefused as error:  # the request names no file that could be at fault
            raise SandboxFault(f"the session cannot be {done}: {error}", where=self.url) from None

    async def _on_file(
        self,
        method: str,
        session_id: str,
        name: str,
        query: str = "",
        content: bytes | None = None,
        max_bytes: int | None = None,
    ) -> bytes:
        path = f"{_path(session_id)}/files/{_encoded(name)}{query}"
        self._use(session_id)
        request = Request(method, path, self._margin_s, content, max_bytes=max_bytes)
        return await self.transport.exchange(request, self._checked)

    def _checked(self, answer: Answer) -> bytes:
        """Return the body of an answer about a session's files. Raises FileRefused, SessionFull, SandboxFault."""
        if answer.status < 300:
            return answer.body
        if answer.status == 507:
            raise SessionFull(_detail(answer))
        if answer.status in (400, 404, 409, 413) and not _detail(answer).startswith(_NO_SESSION):
            raise FileRefused(_detail(answer))
        raise SandboxFault(f"HTTP {answer.status}: {_detail(answer)[:500]}", where=self.url)

    def _session_id(self, answer: Answer) -> str:
        if answer.status in (404, 405):
            raise UserError(
                f"sandbox {self.url} has no sessions (HTTP {answer.status}); drop sandbox.url to use the local one, or "
                "start `verl-dag sandbox serve` there"
            )
        if answer.status == 400:
            raise UserError(f"sandbox {self.url}: {_detail(answer)}")
        if answer.status != 201:
            raise SandboxFault(f"HTTP {answer.status}: {answer.text[:500]}", where=self.url)
        return _readable(answer.body, lambda data: str(data["id"]))

    def _result(self, answer: Answer) -> RunResult:
        if answer.status == 507:  # a full session: its own programs have to delete files
            return RunResult("failed", "", f"[sandbox] {_detail(answer)}", 1, 0.0, answer.tries)
        if answer.status != 200:
            raise SandboxFault(f"HTTP {answer.status}: {answer.text[:500]}", where=self.url)
        return _readable(answer.body, lambda data: read_answer(data, answer.tries))


def _detail(answer: Answer) -> str:
    try:
        return str(json.loads(answer.body)["detail"])
    except (ValueError, TypeError, KeyError):
        return answer.text


def read_answer(data: Any, attempts: int) -> RunResult:
    """Return the result in a /run_code answer. Raises Unavailable for SandboxError; KeyError, TypeError, ValueError or
    AttributeError for a malformed answer."""
    status, compiled, run = data["status"], data.get("compile_result"), data.get("run_result")
    if status == "SandboxError":
        # The end of the message: the reason follows the program itself.
        raise Unavailable(f"SandboxError: {str(data.get('message'))[-500:]}", begun=False)
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


def _readable(body: bytes, read: Callable[[Any], T]) -> T:
    """Return what `read` makes of a body in JSON. Raises Unavailable for a malformed one."""
    try:
        return read(json.loads(body))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        text = body.decode("utf-8", "replace")[:200]
        raise Unavailable(f"unreadable answer ({type(error).__name__}: {error}): {text}") from error


def _files(body: bytes) -> SessionFiles:
    def read(data: Any) -> SessionFiles:
        sizes = {str(file["name"]): int(file["bytes"]) for file in data["files"]}
        modified = {str(file["name"]): float(file["modified"]) for file in data["files"]}
        return SessionFiles(sizes, modified, int(data["used_bytes"]), int(data["quota_bytes"]), bool(data["full"]))

    return _readable(body, read)


def _removed(body: bytes) -> list[str]:
    return _readable(body, lambda data: [str(name) for name in data["removed"]])


def _path(session_id: str) -> str:
    return f"/sessions/{quote(session_id, safe='')}"


def _encoded(name: str) -> str:
    """Return a file's name as a part of a URL. Raises FileRefused for one that leads out of the session."""
    if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise FileRefused(f"{name[:200]!r} is not a relative name inside the session")
    try:
        return quote(name)
    except UnicodeEncodeError:
        raise FileRefused(f"{name[:200]!r} is not valid Unicode") from None


async def check_sandbox(url: str, *, token: str | None = None, timeout_s: float = 10.0) -> None:
    """Raise UserError unless a sandbox answers at `url`."""
    client = SandboxClient(url, token=token, connect_timeout_s=timeout_s)
    try:
        problem = await client.transport.ping()
    finally:
        await client.close()
    if problem:
        raise UserError(
            f"sandbox {client.url} does not answer ({problem}); start it, or drop sandbox.url to use the local one"
        )
