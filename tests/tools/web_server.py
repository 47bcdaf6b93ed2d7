"""A server whose answers are a function of the request, on a thread of its own.

    with WebServer(lambda request, body: {"result": []}) as server:
        ... server.url ... server.requests ...

An answer is JSON data, a (status, text) pair, a `web.Response`, or a fault: "drop" closes the connection without an
answer, "hang" never answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.threaded_server import ThreadedServer


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, Any]
    headers: dict[str, str]
    body: Any


class WebServer(ThreadedServer):
    def __init__(self, answer: Callable[[Request], Any]) -> None:
        self.requests: list[Request] = []
        self._answer = answer
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/here"

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_route("*", "/{path:.*}", self._handle)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        query = {key: request.query.getall(key) for key in request.query}
        received = Request(
            request.method, request.path, query, dict(request.headers), json.loads(data) if data else None
        )
        self.requests.append(received)
        answer = self._answer(received)
        if answer == "hang":
            await asyncio.sleep(3600)
        if answer == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if callable(answer):
            return await answer(request)
        if isinstance(answer, web.StreamResponse):
            return answer
        if isinstance(answer, tuple):
            status, text, *headers = answer
            return web.Response(status=status, text=text, headers=headers[0] if headers else None)
        return web.json_response(answer)
