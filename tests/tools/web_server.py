"""A server whose answers are a function of the request, on a thread of its own.

    with WebServer(lambda request, body: {"result": []}) as server:
        ... server.url ... server.requests ...

An answer is JSON data, a (status, text) pair, a `web.Response`, or a fault: "drop" closes the connection without an
answer, "hang" never answers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, Any]
    headers: dict[str, str]
    body: Any


class WebServer:
    def __init__(self, answer: Callable[[Request], Any]) -> None:
        self.requests: list[Request] = []
        self._answer = answer
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/here"

    def __enter__(self) -> WebServer:
        threading.Thread(target=self._loop.run_forever, daemon=True, name="web-server").start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def start(self) -> None:
        """Listen, again after `stop`."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _stop(self) -> None:
        if self._runner is not None:
            for connection in list(getattr(self._runner.server, "connections", ())):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

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
