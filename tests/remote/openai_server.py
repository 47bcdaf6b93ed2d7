"""A small server with OpenAI's interface that fails on request, and a proxy that does so in front of a real server.

    with OpenAIServer(lambda body: "The answer is 4.", faults={0: "drop", 1: "429"}) as server:
        ... server.url ... server.requests ...
    with OpenAIServer(upstream="http://127.0.0.1:8000/v1", faults=scattered({"drop": 0.05}, seed=1)) as proxy:
        ...

It runs on a thread of its own (`tests/threaded_server.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

from tests.threaded_server import ThreadedServer

FAULTS = ("drop", "truncate", "429", "500", "503", "401", "403", "404", "400", "long", "hang", "nonsense", "empty")
FAULTS += ("crowded", "529", "quota")
"""drop: the connection closes without an answer. truncate: within the answer. long: a prompt beyond the context.
crowded: a prompt of 12 tokens that exceeds a context of 16 with its completion only. hang: no answer at all.
nonsense: not JSON. empty: JSON without an answer. quota: the account's quota is used up."""
Answer = Callable[[dict[str, Any]], Any]
"""Returns the answer to a request's body: a text, a message, or the whole choice if it has a finish_reason."""
Faults = Mapping[int, str] | Callable[[int], str | None]
"""The fault of the k-th request to a completion, from 0; None for none."""


def scattered(shares: Mapping[str, float], seed: int) -> Callable[[int], str | None]:
    """Return faults that hit these shares of the requests, the same ones for the same seed."""

    def fault(number: int) -> str | None:
        draw = random.Random(f"{seed}-{number}").random()
        for name, share in shares.items():
            if draw < share:
                return name
            draw -= share
        return None

    return fault


class OpenAIServer(ThreadedServer):
    """Answers with `answer`, or with what `upstream` (a base URL) answers, except where `faults` says otherwise."""

    def __init__(
        self,
        answer: Answer | None = None,
        *,
        upstream: str | None = None,
        faults: Faults | None = None,
        retry_after: str = "0",
        key: str | None = None,
        models: tuple[str, ...] | None = ("test",),
        before: Callable[[], Any] | None = None,
        strict: bool = False,
    ) -> None:
        """`key`: the one that requests must bring; others get 401. `models` None: there is no list of models. `before`:
        awaited before each answer. `strict`: messages with a tool call that has no answer get 400, as from OpenAI."""
        self.faults: Faults = faults or {}
        self.requests: list[dict[str, Any]] = []
        """The bodies of all requests to completions, those that failed included."""
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self._answer, self._upstream, self._retry_after = answer or (lambda body: "ok"), upstream, retry_after
        self._key, self._models, self._before, self._strict = key, models, before, strict
        super().__init__()

    base_path = "/v1"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.base_path}"

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models", self._list)
        router.add_post("/v1/chat/completions", self._complete)
        router.add_post("/v1/completions", self._complete)

    async def _list(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if self._models is None:
            return web.Response(status=404)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self._models]})

    def _refusal(self, request: web.Request) -> web.Response | None:
        given = self.key_of(request)
        # as servers do that help their users, and log their keys
        return None if self._key in (None, given) else self.error("key", f"Incorrect API key provided: {given}")

    def key_of(self, request: web.Request) -> str:
        return request.headers.get("Authorization", "").removeprefix("Bearer ")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        number = len(self.requests)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if (refusal := self._refusal(request)) is not None:
            return refusal
        fault = self.faults(number) if callable(self.faults) else self.faults.get(number)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self._before is not None:
                await self._before()
            if self._strict and (problem := self.problem_of(body)):
                return self.error("400", problem)
            return await self._fail(request, fault) if fault is not None else await self._reply(request, body)
        finally:
            self.in_flight -= 1

    async def _reply(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self._upstream is None:
            return web.json_response(self.completion(body, self._answer(body)))
        url = self._upstream.removesuffix("/v1") + request.path
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            data = await answer.read()
            return web.Response(body=data, status=answer.status, content_type="application/json")

    async def _fail(self, request: web.Request, fault: str) -> web.StreamResponse:
        assert fault in FAULTS, fault
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault == "truncate":
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
            assert request.transport is not None
            with suppress(ConnectionError):
                request.transport.abort()
            return response
        if fault in ("nonsense", "empty"):
            return web.Response(text="<html>gateway</html>" if fault == "nonsense" else json.dumps(self.empty))
        said = self.words.get(fault, f"fault {fault}")
        return self.error(fault, said, headers={"Retry-After": self._retry_after} if fault in ("429", "503") else {})

    empty: Any = {"choices": []}
    words = {
        "long": "This model's maximum context length is 16 tokens. However, your messages resulted in 40 tokens.",
        "crowded": "This model's maximum context length is 16 tokens. However, you requested 60 tokens (12 in the "
        "messages, 48 in the completion).",
        "quota": "You exceeded your current quota, please check your plan and billing details.",
    }
    """The provider's messages."""

    def error(self, fault: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
        """Return the provider's answer to a refused request: `fault`, or key for a wrong key."""
        codes = {"key": "invalid_api_key", "long": "context_length_exceeded", "quota": "insufficient_quota"}
        status = {"key": 401, "long": 400, "crowded": 400, "quota": 429}.get(fault) or int(fault)
        body = {"error": {"message": message, "type": "error", "param": None, "code": codes.get(fault)}}
        return web.json_response(body, status=status, headers=headers)

    def problem_of(self, body: dict[str, Any]) -> str | None:
        """Return what a strict server finds wrong with a request."""
        return misplaced_answers(body["messages"])

    def completion(self, body: dict[str, Any], answer: Any) -> dict[str, Any]:
        """Return the provider's JSON around what an `Answer` returned."""
        return answer_to(body, answer)


def misplaced_answers(messages: list[dict[str, Any]]) -> str | None:
    """Return OpenAI's error message if a tool call has no answer directly after it, or an answer no call."""
    asked: set[str] = set()
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            if message.get("tool_call_id") not in asked:
                return "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
            asked.remove(message["tool_call_id"])
            continue
        if asked:
            return f"tool_call_ids did not have response messages: {', '.join(sorted(asked))}"
        asked = {call["id"] for call in message.get("tool_calls") or ()}
    return None


def answer_to(body: dict[str, Any], answer: Any) -> dict[str, Any]:
    """Return a completion's JSON around what an `Answer` returned."""
    chat = "messages" in body
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if isinstance(answer, dict) and "finish_reason" in answer:
        choice |= answer
    elif chat:
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        choice |= {"message": message, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
    else:
        choice |= {"text": answer}
    return {
        "id": "1",
        "model": body["model"],
        "choices": [choice],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }


def tool_call(name: str, call_id: str = "c1", **arguments: Any) -> dict[str, Any]:
    """Return an assistant's message with one tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
