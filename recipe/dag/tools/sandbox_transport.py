"""Requests to a sandbox server, over TCP or a UNIX socket: connections, limits, retries.

Invariant: a request ends with an answer, or as a SandboxFault after a bounded number of tries. One that must not be
repeated is sent again only if the server surely has not begun it. Requests go to the server itself, without proxies and
without cookies.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import unquote

import aiohttp
from tenacity import RetryCallState
from yarl import URL

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.core.http import Answer, HttpClient, Unavailable, http_root, read_body, within
from recipe.dag.core.per_loop import PerLoop

logger = logging.getLogger(__name__)

_URL = re.compile(r"((?:[^/]*//)?)(?:[^/@:]*(?::([^/@]*))?@)?(.*?)/*(?:/run_code/*)?", re.DOTALL)
_RETRIED = (429, 500, 502, 503, 504)
_NOT_BEGUN = (429, 503, 504)
"""Of these: the server has not begun what was asked."""
_MAX_PAUSE_S = 5.0
_MAX_BYTES = 256 << 20
"""Of one answer: some hold several files of a program."""
T = TypeVar("T")


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


@dataclass
class _Turns:
    """The state of one event loop."""

    slots: asyncio.Semaphore
    recovery: asyncio.Task[None] | None = None


class Transport(HttpClient):
    """At most `max_concurrent` requests at once, per event loop; further ones wait here."""

    def __init__(
        self,
        url: str,
        *,
        max_concurrent: int = 64,
        connect_timeout_s: float = 5.0,
        retries: int = 4,
        on_unreachable: Callable[[], Awaitable[None]] | None = None,
        token: str | None = None,
    ):
        """`url`: the server's, as `split` accepts it. `retries`: tries after the first. `on_unreachable`: awaited
        before the next try if the server cannot be reached or does not answer; concurrent failures share one call.
        `token`: by default the one in the URL, if any."""
        root, url_token = split(url)
        super().__init__(root, where="sandbox", retries=retries, max_wait_s=_MAX_PAUSE_S, proxies=False)
        self._connect_timeout_s = connect_timeout_s
        self._on_unreachable = on_unreachable
        token = token or url_token
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._turns = PerLoop(lambda: _Turns(asyncio.Semaphore(max_concurrent)))

    async def exchange(self, request: Request, read: Callable[[Answer], T]) -> T:
        """Return what `read` makes of the answer; it may raise Unavailable. Raises SandboxFault, TooLarge."""

        async def attempt(tries: int) -> T:
            return read(replace(await self.send(request), tries=tries))

        try:
            async with self._turns.get().slots:
                return await self.repeat(attempt, repeatable=request.repeatable, before_sleep=self._recover)
        except Unavailable as error:
            raise SandboxFault(str(error), where=self.url) from error

    async def send(self, request: Request) -> Answer:
        """Send a request once, without waiting for a slot. Raises Unavailable, TooLarge."""

        async def read(answer: aiohttp.ClientResponse) -> bytes:
            size, most = answer.content_length or 0, request.max_bytes
            if answer.status == 200 and most is not None and size > most:
                raise TooLarge(f"it has {size} bytes; at most {most} are read")
            return await read_body(answer, _MAX_BYTES)

        # Already encoded: aiohttp would resolve the `..` of a name, which the server has to refuse.
        url = URL(f"{http_root(self.url)}{request.path}", encoded=True)
        timeout = aiohttp.ClientTimeout(sock_connect=self._connect_timeout_s, sock_read=request.read_s)
        answer = await self.try_once(
            request.method, url, data=request.content, headers=self._headers, timeout=timeout, read=read
        )
        if answer.status in _RETRIED:
            status_line = self.status_line(answer.status, answer.text)
            raise Unavailable(status_line, begun=answer.status not in _NOT_BEGUN)
        return answer

    async def ping(self) -> str:
        """Return why the server does not answer; "" if it does."""
        url, limit = f"{http_root(self.url)}/v1/ping", within(self._connect_timeout_s)
        try:
            status = (await self.try_once("GET", url, headers=self._headers, timeout=limit)).status
        except (Unavailable, UserError) as error:
            return str(error)
        return "" if status == 200 else f"HTTP {status} to /v1/ping"

    async def _recover(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if self._on_unreachable is None or not isinstance(error, Unavailable) or not error.unreachable:
            return
        turns = self._turns.get()
        if turns.recovery is None or turns.recovery.done():
            turns.recovery = asyncio.create_task(self._run_recovery(self._on_unreachable))
        await asyncio.shield(turns.recovery)

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
