"""Requests to a sandbox server, over TCP or a UNIX socket: connections, limits, retries.

Invariant: a request ends with an answer, or as a SandboxFault after a bounded number of tries. One that must not be
repeated is sent again only if the server surely has not begun it. Requests go to the server itself, without proxies and
without cookies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential
from yarl import URL

from recipe.dag.core.errors import SandboxFault
from recipe.dag.tools.web import read_bytes

logger = logging.getLogger(__name__)

_UNIX = "http+unix://"
_URL = re.compile(r"((?:[^/]*//)?)(?:[^/@:]*(?::([^/@]*))?@)?(.*?)/*(?:/run_code/*)?", re.DOTALL)
_RETRIED = (429, 500, 502, 503, 504)
_NOT_BEGUN = (429, 503, 504)
"""Of these: the server has not begun what was asked."""
_MAX_PAUSE_S = 5.0
_MAX_BYTES = 256 << 20
"""Of one answer: some hold several files of a program."""
_NAMES = (
    (aiohttp.ConnectionTimeoutError, "ConnectTimeout"),
    (aiohttp.ServerTimeoutError, "ReadTimeout"),
    (aiohttp.ClientConnectorError, "ConnectError"),
)
"""Names of aiohttp's errors in a fault's message; other errors keep their own."""
T = TypeVar("T")


class Unavailable(Exception):
    """An infrastructure failure that is retried. unreachable: no answer came. begun: the server may have begun what was
    asked."""

    def __init__(self, message: str, *, unreachable: bool = False, begun: bool = False):
        super().__init__(message)
        self.unreachable, self.begun = unreachable, begun


class TooLarge(Exception):
    """The body of an answer is larger than the request allows."""


@dataclass(frozen=True)
class Request:
    """read_s: how long an answer may take. repeatable: whether a request that the server may have begun is sent again.
    max_bytes: of the body of a 200."""

    method: str
    path: str
    read_s: float
    content: bytes | None = None
    repeatable: bool = True
    max_bytes: int | None = None


@dataclass(frozen=True)
class Answer:
    """attempt: the number of the try, from 1."""

    status: int
    body: bytes
    attempt: int = 1

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @property
    def detail(self) -> str:
        """The reason in an answer that is an error."""
        try:
            return str(json.loads(self.body)["detail"])
        except (ValueError, TypeError, KeyError):
            return self.text


class _Quiet(aiohttp.BaseConnector):
    """Counts as closed once its loop has ended, so that no warning is printed then."""

    @property
    def closed(self) -> bool:
        return super().closed or self._loop.is_closed()

    def __del__(self) -> None:
        if not self.closed:
            super().__del__()


class _Tcp(_Quiet, aiohttp.TCPConnector): ...


class _Unix(_Quiet, aiohttp.UnixConnector): ...


@dataclass
class _Connection:
    """The state of one event loop."""

    http: aiohttp.ClientSession
    slots: asyncio.Semaphore
    recovery: asyncio.Task[None] | None = field(default=None)


class Transport:
    """Sends requests to one server; the options are those of SandboxClient."""

    def __init__(
        self,
        url: str,
        *,
        max_concurrent: int,
        connect_timeout_s: float,
        retries: int,
        on_unreachable: Callable[[], Awaitable[None]] | None,
        token: str | None,
    ):
        self.url, given = split(url)
        self._max_concurrent = max_concurrent
        self._connect_timeout_s = connect_timeout_s
        self._retries = retries
        self._on_unreachable = on_unreachable
        self._headers = {"Content-Type": "application/json"} | authorization(token or given)
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] = (
            weakref.WeakKeyDictionary()
        )

    async def exchange(self, request: Request, read: Callable[[Answer], T]) -> T:
        """Return what `read` makes of the answer; it may raise Unavailable. Raises SandboxFault, TooLarge."""
        connection, tries = self._connection(), 1

        def is_retried(error: BaseException) -> bool:
            return isinstance(error, Unavailable) and (request.repeatable or not error.begun)

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
                        tries = attempt.retry_state.attempt_number
                        return read(await self.send(request, attempt=tries))
        except Unavailable as error:
            raise SandboxFault(f"{error} ({tries} tries)", where=self.url) from error
        raise AssertionError("the last attempt returns or raises")

    async def send(self, request: Request, *, attempt: int = 1) -> Answer:
        """Send a request once, without waiting for a slot. Raises Unavailable, TooLarge."""
        timeout = aiohttp.ClientTimeout(sock_connect=self._connect_timeout_s, sock_read=request.read_s)
        try:
            async with self._connection().http.request(
                request.method,
                # Already encoded: aiohttp would resolve the `..` of a name, which the server has to refuse.
                URL(f"{http_root(self.url)}{request.path}", encoded=True),
                data=request.content,
                headers=self._headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                size, most = response.content_length or 0, request.max_bytes
                if response.status == 200 and most is not None and size > most:
                    raise TooLarge(f"it has {size} bytes; at most {most} are read")
                answer = Answer(response.status, bytes(await read_bytes(response, _MAX_BYTES)), attempt)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            name = next((name for kind, name in _NAMES if isinstance(error, kind)), type(error).__name__)
            begun = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise Unavailable(f"{name}: {error}".rstrip(": "), unreachable=True, begun=begun) from error
        if answer.status in _RETRIED:
            begun = answer.status not in _NOT_BEGUN
            raise Unavailable(f"HTTP {answer.status}: {answer.text[:200]}", begun=begun)
        return answer

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
        """Close this event loop's connections. The transport can be used again."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.http.close()

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = _Connection(open_http(self.url), asyncio.Semaphore(self._max_concurrent))
        return self._connections[loop]

    async def _recover(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if self._on_unreachable is None or not isinstance(error, Unavailable) or not error.unreachable:
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


def split(url: str) -> tuple[str, str | None]:
    """Return the server's root and the token, from a URL of the form http://HOST, http://NAME:TOKEN@HOST or
    http+unix://PATH, the path of a UNIX socket with %2F for each slash. Each may end in /run_code."""
    match = _URL.fullmatch(url.strip())
    assert match is not None  # the pattern matches every text
    scheme, token, rest = match.groups()
    return scheme + rest, unquote(token) if token else None


def http_root(root: str) -> str:
    """Return what requests to the server at `root` begin with."""
    return "http://localhost" if root.startswith(_UNIX) else root


def open_http(root: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session whose requests to `http_root(root)` reach the server. It has neither proxies nor cookies, and
    does not limit the connections. Needs a running event loop; options: ClientSession's."""
    connector = _Unix(unquote(root.removeprefix(_UNIX)), limit=0) if root.startswith(_UNIX) else _Tcp(limit=0)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), **options)


def authorization(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
