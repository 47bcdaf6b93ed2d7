"""A sandbox whose answers are written by the test, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from recipe.dag.tools.sandbox_client import SandboxClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def finished(stdout: str = "", stderr: str = "", code: int = 0) -> dict[str, Any]:
    """Return the answer to a program that has ended."""
    run = {"status": "Finished", "return_code": code, "stdout": stdout, "stderr": stderr, "execution_time": 0.25}
    whole = {"status": "Failed" if code else "Success", "message": "", "compile_result": None, "run_result": run}
    return whole | {"files": {}}


def always(answer: object = None, **options: Any) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response(answer, **options) if answer is not None else web.Response(**options)

    return handler


@asynccontextmanager
async def serving(handler: Handler, route: str = "POST /run_code", socket: str | None = None) -> AsyncIterator[str]:
    """Serve one route at a free port, or at a UNIX socket; yield the URL of the port."""
    app = web.Application()
    app.router.add_route(*route.split(" "), handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await (web.UnixSite(runner, socket) if socket else web.TCPSite(runner, "127.0.0.1", 0)).start()
    try:
        yield "" if socket else f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def with_stub(
    handler: Handler, scenario: Callable[[SandboxClient], Awaitable], route: str = "POST /run_code", **options: Any
) -> Any:
    """Run the scenario with a client of such a server."""

    async def main() -> Any:
        async with serving(handler, route) as url:
            client = SandboxClient(url, **options)
            try:
                return await scenario(client)
            finally:
                await client.close()

    return asyncio.run(main())
