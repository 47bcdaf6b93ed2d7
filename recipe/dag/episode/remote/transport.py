"""Posts requests to a server with OpenAI's interface: retries, limits, and the sorting of its failures.

Invariant: what may pass (lost connections, time-outs, overload) is repeated a bounded number of times and ends as a
ModelServerFault; what would recur for every request (a wrong key, an unknown model) is a UserError. The key leaves this
module in the Authorization header only: it is removed from every text that a server or library sends back.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from recipe.dag.episode.remote.breaker import CircuitBreaker, Entry, Pace
from recipe.dag.errors import ModelServerFault, UserError
from recipe.dag.types.model import Api

CONNECT_S = 10.0
_RETRIED = frozenset({408, 409, 425, 429})
"""Besides 5xx."""
_SHOWN = 300
"""Characters of a server's message in an error."""
_HIDDEN = "***"


class Refused(ModelServerFault):
    """The server refuses this very request (400, 413, 422), and would again."""

    infra = False


class PromptTooLong(Refused):
    """The prompt, or the prompt with the wanted completion, does not fit into the model's context."""

    room: int | None = None
    """Tokens that the context leaves for a completion, if the server's message says so."""


class _Unavailable(Exception):
    """A failure that may pass. `after_s`: the pause that the server asks for."""

    def __init__(self, message: str, *, after_s: float | None = None, down: bool = True):
        """`down`: it counts for the circuit breaker; being asked to slow down does not."""
        super().__init__(message)
        self.after_s, self.down = after_s, down


@dataclass(slots=True)
class _Connection:
    """What belongs to one event loop."""

    http: aiohttp.ClientSession
    slots: asyncio.Semaphore


class Transport:
    """A client of one server, for any number of coroutines and event loops."""

    def __init__(self, api: Api, *, url: str, key: str | None, where: str, clock: Callable[[], float] = time.monotonic):
        """`url`, `key`: resolved from `api`. `where`: the policy, for messages."""
        self.url, self.where = url.rstrip("/"), where
        self._api, self._key, self._clock = api, key, clock
        self.breaker = CircuitBreaker(api.failures_to_open, api.probe_after_s, clock)
        self._pace = Pace(api.requests_per_minute, clock)
        self._jitter = wait_random_exponential(multiplier=0.5, max=api.max_wait_s)
        self._last_failure = ""
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] = (
            weakref.WeakKeyDictionary()
        )

    def __getstate__(self) -> Any:
        raise TypeError("a Transport holds a key and connections; send its ApiSpec to another process")

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> tuple[dict[str, Any], int]:
        """Return the answer's JSON object and the number of requests that it took. `timeout_s`: for each of them.

        Raises ModelServerFault if all fail, Refused if the server refuses this request, and UserError if it would
        refuse every request."""
        content = json.dumps(body).encode("utf-8", "replace")
        return await self._send("POST", path, content, timeout_s)

    async def check(self, timeout_s: float = 30.0) -> None:
        """Raise UserError if the server does not answer or refuses the key. A server without a list of models passes,
        as any answer does that shows that it is there."""
        try:
            await self._send("GET", "/models", None, timeout_s)
        except Refused:
            return
        except ModelServerFault as fault:
            raise UserError(f"{self.where}: {fault}; start the server, or correct base_url ({self.url})") from None
        finally:
            await self.close()

    async def close(self) -> None:
        """Close this event loop's connections. The client can be used again."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.http.close()

    async def _send(self, method: str, path: str, content: bytes | None, timeout_s: float) -> tuple[dict, int]:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self._api.retries),
            wait=self._pause_s,
            retry=retry_if_exception_type(_Unavailable),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    answer = await self._try(method, path, content, timeout_s)
                    return answer, attempt.retry_state.attempt_number
        except _Unavailable as error:
            raise ModelServerFault(f"{error} ({1 + self._api.retries} tries)", where=self.where) from None
        raise AssertionError("the last attempt returns or raises")

    def _pause_s(self, state: RetryCallState) -> float:
        """Return the pause before the next try: the one that the server asks for, or a random one that grows."""
        error = state.outcome.exception() if state.outcome is not None else None
        jitter = self._jitter(state)
        asked = error.after_s if isinstance(error, _Unavailable) else None
        # requests that were told the same time must not all return at the same moment
        return jitter if asked is None else min(asked + jitter / 4, self._api.max_wait_s)

    async def post_fitting(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> tuple[dict[str, Any], int]:
        """Do as `post`; if prompt and `max_tokens` together exceed the context, which vLLM and SGLang refuse, ask once
        more for as many tokens as are left. Raises PromptTooLong if none are left, Refused if that is not known."""
        try:
            return await self.post(path, body, timeout_s=timeout_s)
        except PromptTooLong as refusal:
            wanted = body.get("max_tokens")
            if refusal.room is None or wanted is None:
                raise Refused(f"{refusal}; lower max_tokens if the prompt is short", where=self.where) from refusal
            if not 0 < refusal.room < wanted:
                raise
            return await self.post(path, {**body, "max_tokens": refusal.room}, timeout_s=timeout_s)

    async def _try(self, method: str, path: str, content: bytes | None, timeout_s: float) -> dict[str, Any]:
        connection, patience_s = self._connection(), self._api.max_wait_s
        while True:
            patience_s = await self._until_probe(patience_s)
            async with connection.slots:
                entry = await self._enter()
                if entry is not None:
                    return await self._counted(entry, self._request(connection.http, method, path, content, timeout_s))
            # the circuit opened while this request waited for its turn

    async def _until_probe(self, patience_s: float) -> float:
        """Wait while the circuit is open, for at most `patience_s`, and return what is left of it. Raises
        ModelServerFault."""
        while (pause := self.breaker.wait_s()) > 0:
            if pause > patience_s:
                raise ModelServerFault(
                    f"no request is sent after {self.breaker.failures} failures in a row, the last: "
                    f"{self._last_failure}",
                    where=self.where,
                )
            patience_s -= pause
            await asyncio.sleep(pause)
        return patience_s

    async def _enter(self) -> Entry | None:
        """Return the permission to send a request, once the rate allows it; None if the circuit is open by then."""
        entry = self.breaker.enter()
        if entry is None:
            return None
        try:
            await asyncio.sleep(self._pace.reserve())
        except BaseException:
            self.breaker.gave_up(entry)
            raise
        return entry if self.breaker.admits(entry) else None

    async def _counted(self, entry: Entry, request: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """Await a request and report its end to the circuit breaker."""
        try:
            answer = await request
        except _Unavailable as error:
            self._last_failure = str(error)
            self.breaker.failed(entry) if error.down else self.breaker.gave_up(entry)
            raise
        except (ModelServerFault, UserError):
            self.breaker.succeeded(entry)  # it answered
            raise
        except BaseException:
            self.breaker.gave_up(entry)
            raise
        self.breaker.succeeded(entry)
        return answer

    async def _request(
        self, http: aiohttp.ClientSession, method: str, path: str, content: bytes | None, timeout_s: float
    ) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
        try:
            # a redirect could carry the key to another host
            async with http.request(
                method, self.url + path, data=content, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                status, received, data = answer.status, answer.headers, await answer.read()
        except TimeoutError as error:
            raise _Unavailable(f"no answer within {timeout_s:.0f} s") from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise UserError(f"{self.where}: base_url is not a URL of a server ({self.url})") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Unavailable(self._clean(f"{type(error).__name__}: {error}".rstrip(": "))) from None
        text = data.decode("utf-8", "replace")
        if status != 200:
            raise self._failure(status, received, text, path)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise _Unavailable(f"the answer is not a JSON object: {self._clean(text)[:_SHOWN]!r}")
        return value

    def _failure(self, status: int, headers: Mapping[str, str], text: str, path: str) -> Exception:
        """Return the exception for an answer that is not 200."""
        message, code = _error_in(text)
        said = f"HTTP {status}" + (f": {self._clean(message)[:_SHOWN]}" if message else "")
        if status == 429 and code == "insufficient_quota":
            return UserError(f"{self.where}: {self.url} says that the quota is used up ({said})")
        if status in _RETRIED or status >= 500:
            return _Unavailable(said, after_s=_retry_after(headers.get("Retry-After")), down=status >= 500)
        if path == "/models" and status not in (401, 403):
            return Refused(said, where=self.where)
        if status in (401, 402, 403):
            source = f"the key in {self._api.key_env}" if self._api.key_env else "a request without a key (set key_env)"
            return UserError(f"{self.where}: {self.url} refuses {source} ({said})")
        if status in (404, 405) or status < 400:
            advice = "check base_url and api.model"
            return UserError(f"{self.where}: {self.url}{path} has no model {self._api.model!r} ({said}); {advice}")
        if code == "context_length_exceeded" or any(words in message.lower() for words in _TOO_LONG):
            refusal = PromptTooLong(said, where=self.where)
            refusal.room = room_in(message)
            return refusal
        return Refused(f"the server refuses the request ({said})", where=self.where)

    def _clean(self, text: str) -> str:
        """Return a text in one line, without the key."""
        text = " ".join(text.split())
        return text.replace(self._key, _HIDDEN) if self._key else text

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            # trust_env: proxies of the environment; the key's header is set, so no .netrc is read for it
            http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), trust_env=True
            )
            self._connections[loop] = _Connection(http, asyncio.Semaphore(self._api.max_concurrent))
        return self._connections[loop]


_TOO_LONG = ("maximum context length", "context length", "longer than the model", "too many tokens", "max_model_len")
"""Parts of the messages by which servers say that a prompt is too long."""


_CONTEXT = re.compile(r"context length (?:is |of )?(\d+)")
_PROMPT = re.compile(r"(\d+) (?:tokens )?(?:input tokens|prompt tokens|(?:in|from) the (?:input|messages|prompt))")
_HAS = re.compile(r"(?:prompt has|messages resulted in) (\d+) tokens")


def room_in(message: str) -> int | None:
    """Return the tokens that a server's refusal says are left for a completion: the context's length minus the
    prompt's, at least 0; None if it does not name both."""
    context, prompt = _CONTEXT.search(message), _PROMPT.search(message) or _HAS.search(message)
    return max(0, int(context[1]) - int(prompt[1])) if context and prompt else None


def _error_in(text: str) -> tuple[str, str]:
    """Return the message and the code in an error's body, in OpenAI's form or any other."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text, ""
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return str(error), ""
    return str(error.get("message") or error.get("detail") or text), str(error.get("code") or "")


def _retry_after(value: str | None) -> float | None:
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
    except ValueError:
        return None
    return max((moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
