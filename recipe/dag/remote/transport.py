"""Posts requests to a provider's server: retries, limits, budget, and the sorting of its failures.

Invariant: what may pass (lost connections, time-outs, overload) is repeated a bounded number of times and ends as a
ModelServerFault; what would recur for every request (a wrong key, an unknown model) is a UserError. The key leaves this
module in a header only: it is removed from every answer and every text that a server or library sends back. An answer
is read up to a bound. What it cost is counted before another request takes its slot. A request that waits for a slot or
for the rate has not started: no time limit runs on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipe.dag.core.errors import ModelServerFault, PromptTooLong, Refused, UserError
from recipe.dag.core.http import HIDDEN, SHOWN, Answer, HttpClient, Unavailable, retry_after, within
from recipe.dag.core.pace import Pace
from recipe.dag.core.per_loop import PerLoop
from recipe.dag.core.time_limit import waiting
from recipe.dag.remote.breaker import CircuitBreaker, Entry
from recipe.dag.remote.google_token import GoogleTokens
from recipe.dag.remote.ledger import Account, BudgetError, BudgetFault
from recipe.dag.remote.openai import OpenAIWire
from recipe.dag.remote.wire import Refusal, Wire
from recipe.dag.types.model import Api

log = logging.getLogger(__name__)

_RETRIED = frozenset({408, 409, 425, 429})
"""Besides 5xx."""
_MOST_REFUSED = 8
"""A server that has refused as many requests, and accepted none, refuses them all."""
_SHORTEST_KEY = 8


Read = Callable[[dict[str, Any]], object]
"""Reads an answer; raises ModelServerFault for one that cannot be used."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, which may be repeated."""

    method: str
    path: str
    content: bytes | None
    timeout_s: float
    """For each try."""
    read: Read | None = None
    ping: bool = False
    """It only asks whether the server is there, and costs nothing."""
    names_model: bool = False
    """A ping that gets 404 if there is no such model."""


class Transport(HttpClient):
    """A client of one server."""

    def __init__(
        self,
        api: Api,
        *,
        url: str,
        key: str | None,
        where: str,
        wire: Wire | None = None,
        account: Account | None = None,
        tokens: GoogleTokens | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`url`, `key`: resolved from `api`. `where`: the policy, for messages. `wire`: by default OpenAI's. `account`:
        where requests are counted; by default its own, without a budget. `tokens`: keys that expire, in place of
        `key`."""
        super().__init__(url.rstrip("/"), where=where, key=key, retries=api.retries, max_wait_s=api.max_wait_s)
        self.wire: Wire = wire or OpenAIWire()
        self.account = account or Account()
        self._api, self._tokens = api, tokens
        self.breaker = CircuitBreaker(api.failures_to_open, api.probe_after_s, clock)
        self._pace = Pace(api.requests_per_minute, clock, period_s=60.0)
        self._slots = PerLoop(lambda: asyncio.Semaphore(api.max_concurrent))
        self._last_failure = ""
        self._accepted = False
        self._refused = 0
        """Requests that the server has refused before it accepted one."""
        self._warned = False

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, read: Read | None = None
    ) -> tuple[dict[str, Any], int]:
        """Return the answer's JSON object and the number of requests that it took. `timeout_s`: for each of them.
        It is repeated if `read` cannot use the answer, since gateways report a failure behind them in this way.

        Raises ModelServerFault if all fail, Refused if the server refuses this request, and UserError if it would
        refuse every request."""
        content = json.dumps(body).encode("utf-8", "replace")
        return await self._send(Request("POST", path, content, timeout_s, read))

    async def check(self, timeout_s: float = 30.0) -> None:
        """Raise UserError if the server does not answer or refuses the key, or if the provider itself has no such
        model. Any other answer shows that a server is there, which need not have a list of models."""
        ping = self.wire.ping(self._api.model)
        content = None if ping.body is None else json.dumps(ping.body).encode()
        names_model = ping.names_model and self._api.base_url is None
        try:
            await self._send(Request(ping.method, ping.path, content, timeout_s, ping=True, names_model=names_model))
        except Refused:
            return
        except ModelServerFault as fault:
            raise UserError(f"{self.where}: {fault}; start the server, or correct base_url ({self.url})") from None
        finally:
            await self.close()

    async def _send(self, request: Request) -> tuple[dict[str, Any], int]:
        async def attempt(tries: int) -> tuple[dict[str, Any], int]:
            answer = await self._try(request)
            if request.read is not None:
                _check(answer, request.read)
            return answer, tries

        try:
            return await self.repeat(attempt)
        except Unavailable as error:
            raise ModelServerFault(str(error), where=self.where) from None

    async def post_fitting(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, read: Read | None = None
    ) -> tuple[dict[str, Any], int]:
        """Do as `post`; if prompt and `max_tokens` together exceed the context, which vLLM and SGLang refuse, ask once
        more for as many tokens as are left. Raises PromptTooLong if none are left, Refused if that is not known."""
        try:
            return await self.post(path, body, timeout_s=timeout_s, read=read)
        except PromptTooLong as refusal:
            wanted = self.wire.max_tokens(dict(body))
            if refusal.room is None or wanted is None:
                raise Refused(f"{refusal}; lower max_tokens if the prompt is short", where=self.where) from refusal
            if not 0 < refusal.room < wanted:
                raise
            return await self.post(path, self.wire.limited(dict(body), refusal.room), timeout_s=timeout_s, read=read)

    async def _try(self, request: Request) -> dict[str, Any]:
        slots, patience_s = self._slots.get(), self._api.max_wait_s
        while True:
            patience_s = await self._until_probe(patience_s)
            with waiting():
                await slots.acquire()
            try:
                entry = await self._enter()
                if entry is not None:
                    return await self._counted(entry, request)
            finally:
                slots.release()
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
            with waiting():
                await self._pace.wait()
        except BaseException:
            self.breaker.gave_up(entry)
            raise
        return entry if self.breaker.admits(entry) else None

    async def _counted(self, entry: Entry, request: Request) -> dict[str, Any]:
        """Send a request; report its end to the circuit breaker, and what it cost to the account."""
        answered = False
        try:
            if not request.ping:
                self.account.admit(self.where)
            answer = await self.exchange(request)
            answered = True
        except Unavailable as error:
            self._last_failure = str(error)
            if error.down and self.breaker.failed(entry):
                self.account.add(opened=1)
            raise
        except (BudgetFault, BudgetError):
            raise  # nothing was sent
        except Refused as refusal:
            answered = True
            if not request.ping and not isinstance(refusal, PromptTooLong):
                self._count_refusal(refusal)
            raise
        except (ModelServerFault, UserError):
            answered = True
            raise
        finally:
            self.breaker.succeeded(entry) if answered else self.breaker.gave_up(entry)
        if not request.ping:
            self._accepted = True
            tokens = self.wire.tokens(answer)
            self.account.charge(*tokens)
            self._warn_uncounted(tokens)
        return answer

    def _count_refusal(self, refusal: Refused) -> None:
        """Raise UserError after the first refusals if the server has accepted no request yet: agents that may fail
        (`on_failure: skip`) would otherwise be skipped for the whole run."""
        if self._accepted:
            return
        self._refused += 1
        if self._refused >= _MOST_REFUSED:
            raise UserError(f"{refusal}, and {self._refused - 1} before it; correct the agent's sampling, or api.body")

    def _warn_uncounted(self, tokens: tuple[int, int]) -> None:
        """Warn once if a budget of money or tokens cannot hold, since the server reports no usage."""
        budget = self.account.budget
        if any(tokens) or self._warned or budget is None or (budget.usd is None and budget.tokens is None):
            return
        self._warned = True
        log.warning("%s: an answer has no usage, so budget.usd and budget.tokens do not count it", self.where)

    async def exchange(self, request: Request) -> dict[str, Any]:
        """Send a request once and return the answer's JSON object. Raises Unavailable for a failure that may pass,
        else ModelServerFault and UserError."""
        if self._tokens is not None:
            self._key = await self._token()
        answer = await self._answer(request)
        if answer.status == 401 and self._tokens is not None:  # revoked before its time
            self._key = await self._token(refused=self._key)
            answer = await self._answer(request)
        if answer.status != 200:
            raise self._failure(answer, self.wire.refusal(answer.status, answer.text), request)
        try:
            value = json.loads(answer.text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Unavailable(f"the answer is not a JSON object: {self.line(answer.text)[:SHOWN]!r}")
        return self._unquoted(value)

    async def _token(self, refused: str | None = None) -> str:
        assert self._tokens is not None  # asked by the callers
        try:
            return await self._tokens.get(refused)
        except ModelServerFault as fault:
            raise Unavailable(str(fault), down=False) from fault

    async def _answer(self, request: Request) -> Answer:
        headers = {"Content-Type": "application/json", **self.wire.headers(self._key)}
        url, limit = self.url + request.path, within(request.timeout_s)
        return await self.try_once(request.method, url, data=request.content, headers=headers, timeout=limit)

    def _failure(self, answer: Answer, refusal: Refusal, request: Request) -> Exception:
        status, status_line = answer.status, self.status_line(answer.status, refusal.message)
        if refusal.kind == "quota":
            return UserError(f"{self.where}: {self.url} says that the quota is used up ({status_line})")
        if refusal.kind == "key" or status in (401, 402, 403):
            named = f"the key in {self._api.key_env}" if self._key else "a request without a key (set key_env)"
            source = named if self._tokens is None else "the token of Google's credentials"
            return UserError(f"{self.where}: {self.url} refuses {source} ({status_line})")
        if status in _RETRIED or status >= 500:
            after = retry_after(answer.headers.get("Retry-After"))
            return Unavailable(status_line, after_s=refusal.after_s if after is None else after, down=status >= 500)
        if request.ping and not (status == 404 and request.names_model):
            return Refused(status_line, where=self.where)
        if status in (404, 405) or status < 400:
            endpoint, advice = f"{self.url}{request.path}", "check base_url and api.model"
            return UserError(f"{self.where}: {endpoint} has no model {self._api.model!r} ({status_line}); {advice}")
        if refusal.kind == "too_long":
            too_long = PromptTooLong(status_line, where=self.where)
            too_long.room = refusal.room
            return too_long
        return Refused(f"the server refuses the request ({status_line})", where=self.where)

    def _unquoted(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer without the key, however the server has escaped it."""
        if not self._secret:
            return answer
        text = json.dumps(answer)
        cleaned = text.replace(json.dumps(self._secret)[1:-1], HIDDEN)
        return answer if cleaned == text else json.loads(cleaned)

    @property
    def _secret(self) -> str:
        """The key; "" for one below _SHORTEST_KEY characters: those are dummies of local servers, such as `none`, and
        occur in ordinary texts."""
        key = self._key or ""
        return key if len(key) >= _SHORTEST_KEY else ""


def _check(answer: dict[str, Any], read: Read) -> None:
    """Raise Unavailable for an answer that cannot be used."""
    try:
        read(answer)
    except ModelServerFault as fault:
        raise Unavailable(str(fault), down=False) from fault
