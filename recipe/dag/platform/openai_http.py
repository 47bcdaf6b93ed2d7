"""The HTTP side of the servers with OpenAI's interface: routes that need no model, errors, start and end.

Invariant: every answer is JSON, every failure has OpenAI's error form, and the request of a client that has gone is
cancelled. A web page can ask nothing, neither from its own origin nor through DNS rebinding. A body is bounded, and
decoded off the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from recipe.dag.core.errors import UserError
from recipe.dag.platform.openai_wire import BadRequest, Body, ChatRequest, read
from recipe.dag.tools.sandbox import is_for_loopback, is_from_page, is_loopback

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 << 20


def application(name: str, problem: Callable[[], str | None] = lambda: None, **card: Any) -> web.Application:
    """Return an application that answers /health and /v1/models.

    name: the model's, in every request.
    problem: why the server cannot answer, or None; /health then has status 503.
    card: further fields of the model's entry in /v1/models."""
    entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "verl-dag", **card}

    async def health(request: web.Request) -> web.Response:
        if (message := problem()) is not None:
            raise BadRequest(message, status=503)
        return web.json_response({"status": "ok"})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [entry]})

    async def model(request: web.Request) -> web.Response:
        check_model(request.match_info["name"], name)
        return web.json_response(entry)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    return app


def check_model(wanted: str, served: str) -> None:
    """Raise BadRequest unless the request names the model that is served."""
    if wanted != served:
        problem = f"there is no model {wanted!r}; this server has {served!r}"
        raise BadRequest(problem, status=404, code="model_not_found", param="model")


def answer_to(
    kind: type[Body], model: str, number: int, choices: list[dict[str, Any]], usage: dict[str, int]
) -> dict[str, Any]:
    """Return the body of the answer to a request of this kind; `number` tells it from the server's other answers."""
    prefix, name = ("chatcmpl", "chat.completion") if kind is ChatRequest else ("cmpl", "text_completion")
    return {
        "id": f"{prefix}-{number}",
        "object": name,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage,
    }


async def body_of(request: web.Request, kind: type[Body]) -> Body:
    """Return a request's body as a `kind`. Raises BadRequest."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise BadRequest("send the body without Content-Encoding", status=415)
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413) from None
    return await asyncio.to_thread(_decoded, body, kind)


def _decoded(body: bytes, kind: type[Body]) -> Body:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    return read(kind, data)


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    try:
        _refuse_pages(request)
        return await handler(request)
    except BadRequest as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPException as error:
        problem = BadRequest(f"{error.reason}: {request.method} {request.path}", status=error.status)
        return web.json_response(problem.body(), status=error.status)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        problem = BadRequest(f"{type(error).__name__}: {error}", status=500)
        return web.json_response(problem.body(), status=500)


def _refuse_pages(request: web.Request) -> None:
    if is_from_page(request):
        raise BadRequest("requests of web pages are refused", status=403)
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    # a connection from elsewhere has another address; its host may be any name of this machine
    if isinstance(address, tuple) and is_loopback(address[0]) and not is_for_loopback(request):
        raise BadRequest("address the server as localhost: it answers no other Host here", status=403)


def serve(app: web.Application, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` gets the server's URL once it answers. Raises UserError."""
    asyncio.run(serve_until_signal(app, host, port, announce))


async def serve_until_signal(app: web.Application, host: str, port: int, announce: Callable[[str], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job outlives Ctrl-C
            loop.add_signal_handler(number, stop.set)
    # without handler_cancellation, a client that has gone would be generated for until its limit
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}; pass another --port") from None
        announce(f"http://{host}:{runner.addresses[0][1]}")
        await stop.wait()
    finally:
        await runner.cleanup()
