"""A client of one HTTP server: connections, tries, bounded answers, and texts without the key.

Invariant: a try ends with an answer of any status, read up to a bound, or as Unavailable; the number of tries is
bounded. No redirect is followed, since it could carry the key to another host. There are no cookies. What `validate`
imports must not import this module, because of aiohttp.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential
from yarl import URL

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.per_loop import PerLoop

MAX_BYTES = 16 << 20
"""Of one answer."""
SHOWN = 300
"""Characters of a server's message in an error."""
HIDDEN = "***"
_CONNECT_S = 10.0
_UNIX = "http+unix://"
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_NAMES = (
    (aiohttp.ConnectionTimeoutError, "ConnectTimeout"),
    (aiohttp.ServerTimeoutError, "ReadTimeout"),
    (aiohttp.ClientConnectorError, "ConnectError"),
)
"""Names of aiohttp's errors in messages; other errors keep their own."""
T = TypeVar("T")
Read = Callable[[aiohttp.ClientResponse], Awaitable[bytes]]


class Unavailable(Exception):
    """A failure that may pass.

    after_s: the pause that the server asks for. begun: the server may have begun what was asked. unreachable: no answer
    came. down: the server is at fault; one that only asks to slow down is not.
    """

    tries = 0
    """How often a request was tried that is given up; 0 before."""

    def __init__(
        self,
        message: str,
        *,
        after_s: float | None = None,
        begun: bool = True,
        unreachable: bool = False,
        down: bool = True,
    ):
        super().__init__(message)
        self.after_s, self.begun, self.unreachable, self.down = after_s, begun, unreachable, down

    def __str__(self) -> str:
        return f"{super().__str__()} ({counted(self.tries, 'try', 'tries')})" if self.tries else super().__str__()


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    tries: int = 1

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class HttpClient:
    """A client for any number of coroutines and event loops."""

    def __init__(
        self, url: str, *, where: str, retries: int, max_wait_s: float, key: str | None = None, proxies: bool = True
    ):
        """`where`: the client's owner, for messages. `retries`: tries after the first. `max_wait_s`: the longest pause
        before one. `proxies`: use those of the environment, which cannot reach a server of this machine."""
        self.url, self.where = url, where
        self._key, self._retries, self._max_wait_s = key, retries, max_wait_s
        self._jitter = wait_random_exponential(multiplier=0.5, max=max_wait_s)
        # .netrc, which `trust_env` allows too, is not read for a request with an Authorization header
        self._sessions = PerLoop(lambda: open_http(self.url, trust_env=proxies and not _is_on_this_machine(self.url)))

    def __getstate__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} holds a key and connections; make one in the other process")

    async def close(self) -> None:
        """Close this event loop's connections. The client can be used again."""
        session = self._sessions.pop()
        if session is not None:
            await session.close()

    async def try_once(
        self, method: str, url: str | URL, *, timeout: aiohttp.ClientTimeout, read: Read | None = None, **options: Any
    ) -> Answer:
        """Send a request and return the answer. `read`: reads the body, by default `read_body`. `options`: aiohttp's,
        such as `headers` and `json`. Raises Unavailable, and UserError if the URL is none."""
        try:
            request = self._sessions.get().request(method, url, timeout=timeout, allow_redirects=False, **options)
            async with request as answer:
                return Answer(answer.status, answer.headers, await (read or read_body)(answer))
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise UserError(f"{self.where}: {self.url} is not the URL of a server") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: of a header that cannot be sent
            begun = not isinstance(error, _NOT_SENT)
            raise Unavailable(self._described(error, timeout.total), begun=begun, unreachable=True) from None

    async def repeat(
        self,
        attempt: Callable[[int], Awaitable[T]],
        *,
        retries: int | None = None,
        repeatable: bool = True,
        before_sleep: Callable[[RetryCallState], Awaitable[None]] | None = None,
    ) -> T:
        """Return what `attempt` returns, which is called with the number of the try, from 1, until it does not raise
        Unavailable. `repeatable`: False if the server must not do it twice: there is no other try once it may have
        begun. `before_sleep`: tenacity's. Raises the last Unavailable, with its `tries`."""

        def may_pass(error: BaseException) -> bool:
            return isinstance(error, Unavailable) and (repeatable or not error.begun)

        tries = 0
        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + (self._retries if retries is None else retries)),
            wait=self._pause_s,
            retry=retry_if_exception(may_pass),
            before_sleep=before_sleep,
            reraise=True,
        )
        try:
            async for state in retrying:
                with state:
                    tries = state.retry_state.attempt_number
                    return await attempt(tries)
        except Unavailable as error:
            error.tries = tries
            raise
        raise AssertionError("the last attempt returns or raises")

    def clean(self, text: str) -> str:
        """Return a text without the key."""
        return text.replace(self._secret, HIDDEN) if self._secret else text

    def line(self, text: str) -> str:
        """Return a text in one line, without the key."""
        return self.clean(" ".join(text.split()))

    def status_line(self, status: int, message: str) -> str:
        """Return what an error says of an answer."""
        return f"HTTP {status}: {self.line(message)[:SHOWN]}".rstrip(": ")

    @property
    def _secret(self) -> str:
        return self._key or ""

    def _described(self, error: BaseException, total_s: float | None) -> str:
        if type(error) is TimeoutError and total_s is not None:
            return f"no answer within {total_s:g} s"
        name = next((name for kind, name in _NAMES if isinstance(error, kind)), type(error).__name__)
        return self.line(f"{name}: {error}".rstrip(": "))[:SHOWN]

    def _pause_s(self, state: RetryCallState) -> float:
        """Return the pause before the next try: the one that the server asks for, or a random one that grows."""
        error = state.outcome.exception() if state.outcome is not None else None
        jitter = self._jitter(state)
        asked = error.after_s if isinstance(error, Unavailable) else None
        # requests with the same time to wait must not all return at the same moment
        return jitter if asked is None else min(asked + jitter / 4, self._max_wait_s)


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


def open_http(root: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session whose requests to `http_root(root)` reach the server. It has no cookies, and does not limit the
    connections. Needs a running event loop; options: ClientSession's."""
    connector = _Unix(unquote(root.removeprefix(_UNIX)), limit=0) if root.startswith(_UNIX) else _Tcp(limit=0)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), **options)


def http_root(root: str) -> str:
    """Return what requests to the server at `root`, which may be http+unix://PATH, begin with."""
    return "http://localhost" if root.startswith(_UNIX) else root


def within(seconds: float) -> aiohttp.ClientTimeout:
    """Return the time limit of a whole try."""
    return aiohttp.ClientTimeout(total=seconds, sock_connect=min(_CONNECT_S, seconds))


async def read_body(answer: aiohttp.ClientResponse, most: int | None = None) -> bytes:
    """Return the body. Raises ClientPayloadError if it is longer than `most`, by default MAX_BYTES."""
    body, most = bytearray(), MAX_BYTES if most is None else most
    async for chunk in answer.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > most:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {most >> 20} MiB")
    return bytes(body)


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


def _is_on_this_machine(url: str) -> bool:
    """Return whether the URL's host is the loopback address."""
    with suppress(ValueError):
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False
