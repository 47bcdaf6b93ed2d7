"""Requests of tools to a service: retries, keys, and the sorting of failures.

Invariant: what may pass (lost connections, time-outs, overload) is repeated a bounded number of times and ends as a
ToolFault of the infrastructure; what would recur for every request (a wrong key, a redirect) is a UserError; every
other answer is returned. The key leaves this module in one header only: it is removed from everything that is returned.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.tools.address import is_on_this_machine, url_problem

CONNECT_S = 10.0
MAX_WAIT_S = 10.0
"""Longest pause before a request is repeated."""
MAX_BYTES = 16 << 20
"""Of one answer."""
SHOWN = 300
"""Characters of a server's message in an error."""
_REFUSING = (401, 402, 403, 407)
_OVERLOADED = (408, 425, 429, 503)
"""The server says that it has not done what was asked."""
_HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer that is no failure of the infrastructure."""

    status: int
    headers: Mapping[str, str]
    text: str
    tries: int = 1

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class _Unavailable(Exception):
    """A failure that may pass. `reached`: the server may have done what was asked."""

    def __init__(self, message: str, *, after_s: float | None = None, reached: bool = True):
        super().__init__(message)
        self.after_s, self.reached = after_s, reached


Read = Callable[[aiohttp.ClientResponse], Awaitable[str]]


class WebService:
    """A client of one service, for any number of coroutines and event loops."""

    def __init__(
        self,
        url: str,
        *,
        where: str,
        key: str | None = None,
        key_header: str = "Authorization",
        timeout_s: float = 20.0,
        retries: int = 3,
    ):
        """`where`: the tool, for messages. `timeout_s`: of each request. `retries`: requests after the first. Raises
        UserError for a text that is not a URL."""
        if problem := url_problem(url):
            raise UserError(f"{where}: url: {problem}")
        self.url, self.where = url, where
        self._key, self._key_header = key, key_header
        self._timeout_s, self._retries = timeout_s, retries
        self._jitter = wait_random_exponential(multiplier=0.5, max=MAX_WAIT_S)
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            weakref.WeakKeyDictionary()
        )

    def __getstate__(self) -> Any:
        raise TypeError("a WebService holds a key and connections; send its options to another process")

    async def send(
        self,
        method: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        read: Read | None = None,
        repeatable: bool = True,
        once: bool = False,
    ) -> Answer:
        """Send a request and return the answer, with any status that says something about this very request.

        read: reads the body; by default as text. repeatable: False if the server must not do it twice: it is then
        repeated only if the server has not received or has refused it. once: never repeat it.

        Raises ToolFault if all tries fail, and UserError if the service would refuse every request.
        """

        def may_pass(error: BaseException) -> bool:
            return isinstance(error, _Unavailable) and (repeatable or not error.reached)

        tries = 0
        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 if once else 1 + self._retries),
            wait=self._pause_s,
            retry=retry_if_exception(may_pass),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    tries = attempt.retry_state.attempt_number
                    return await self._try(method, json, params, headers or {}, read or read_text, tries)
        except _Unavailable as error:
            count = "1 try" if tries == 1 else f"{tries} tries"
            raise ToolFault(f"{self.url}: {error} ({count})", where=self.where, infra=True) from None
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Close this event loop's connections. The client can be used again."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def clean(self, text: str) -> str:
        """Return a text without the key."""
        return text.replace(self._key, _HIDDEN) if self._key else text

    def _pause_s(self, state: RetryCallState) -> float:
        """Return the pause before the next try: the one that the server asks for, or a random one that grows."""
        error = state.outcome.exception() if state.outcome is not None else None
        jitter = self._jitter(state)
        asked = error.after_s if isinstance(error, _Unavailable) else None
        # requests with the same time to wait must not all return at the same moment
        return jitter if asked is None else min(asked + jitter / 4, MAX_WAIT_S)

    async def _try(
        self,
        method: str,
        json: Any,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        read: Read,
        tries: int,
    ) -> Answer:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(CONNECT_S, self._timeout_s))
        headers = {**headers, **self._authorization()}
        session = self._session()
        try:
            # a redirect could carry the key to another host
            async with session.request(
                method, self.url, json=json, params=params, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                status, received = answer.status, answer.headers
                text = self.clean(await read(answer))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _Unavailable(self._said(error), reached=False) from None
        except TimeoutError:
            raise _Unavailable(f"no answer within {self._timeout_s:g} s") from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise UserError(f"{self.where}: {self.url} is not the URL of a server") from None
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            raise _Unavailable(self._said(error)) from None
        said = f"HTTP {status}" + (f": {' '.join(text.split())[:SHOWN]}" if text.strip() else "")
        if status in _OVERLOADED or status >= 500:
            after_s = retry_after(received.get("Retry-After"))
            raise _Unavailable(said, after_s=after_s, reached=status not in _OVERLOADED)
        if status in _REFUSING:
            key = "the key" if self._key else "requests without a key (set key_env)"
            raise UserError(f"{self.where}: {self.url} refuses {key} ({said})")
        if 300 <= status < 400:
            target = self.clean(received.get("Location", "another URL"))
            raise UserError(f"{self.where}: {self.url} redirects to {target} (HTTP {status}); write that URL")
        return Answer(status, received, text, tries)

    def _authorization(self) -> dict[str, str]:
        if self._key is None:
            return {}
        return {self._key_header: f"Bearer {self._key}" if self._key_header == "Authorization" else self._key}

    def _said(self, error: BaseException) -> str:
        return self.clean(" ".join(f"{type(error).__name__}: {error}".split()).rstrip(": "))[:SHOWN]

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            # trust_env: proxies of the environment; limits are the workflow's (`workers`), not the connector's
            proxies = not is_on_this_machine(self.url)
            self._sessions[loop] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), trust_env=proxies
            )
        return self._sessions[loop]


async def read_text(answer: aiohttp.ClientResponse) -> str:
    """Return the body as text. Raises ClientPayloadError if it is longer than MAX_BYTES."""
    return (await read_bytes(answer, MAX_BYTES)).decode("utf-8", "replace")


async def read_bytes(answer: aiohttp.ClientResponse, most: int) -> bytearray:
    """Return the body. Raises ClientPayloadError if it is longer than `most`."""
    body = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > most:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {most >> 20} MiB")
    return body


def retry_after(value: str | None) -> float | None:
    """Return the seconds in a Retry-After header, which holds seconds or a date; None if it is missing or neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
        return max(seconds, 0.0) if seconds == seconds else None  # NaN
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
        left = moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)
    except (ValueError, OverflowError, TypeError, IndexError):  # a server's dates have any year and any zone
        return None
    return max(left.total_seconds(), 0.0)
