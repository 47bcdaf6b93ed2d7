"""The base of servers for tests: each runs on a thread of its own, so that tests with and without an event loop, and
other processes, can use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

from aiohttp import web

from tests.zygote import hold_port


class ThreadedServer:
    """`kill` and `start` make it vanish, connections included, and come back at the same address."""

    def __init__(self) -> None:
        self._held = hold_port()  # also between `kill` and `start`
        self.port = self._held.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=type(self).__name__)
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)  # a loop that still runs cannot be entered again

    def start(self) -> None:
        """Listen, again after `kill`."""
        self._run(self._start())

    def kill(self) -> None:
        """Close the port and all connections, as a process that is killed does."""
        self._run(self._kill())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        self.add_routes(app.router)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _kill(self) -> None:
        if self._runner is not None:
            for connection in list(getattr(self._runner.server, "connections", ())):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None
