"""The middleware for every request: access, answers to failures, logging.

Invariant: every answer is JSON, also to what is not HTTP, names the isolation, and carries no traceback of the server.
Requests of web pages are refused. Without a token only requests that were addressed to localhost are answered, so a web
page cannot reach the server by DNS rebinding.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import BasicAuth, web

from recipe.sandbox import log
from recipe.sandbox.fair_queue import Overloaded
from recipe.sandbox.sessions import NoSession
from recipe.sandbox.web_pages import is_for_loopback, is_from_page
from recipe.sandbox.wire import Invalid

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ISOLATION_HEADER = "X-Sandbox-Isolation"
CLIENT_HEADER = "X-Client-Id"
_OUTCOME = "outcome"


def middlewares(token: str) -> list[Any]:
    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.monotonic()
        status = 0
        try:
            refused = _refuse(request, token)
            response = refused if refused is not None else await _answered(request, handler)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            log.event(
                "request",
                method=request.method,
                route=resource.canonical if resource is not None else None,
                client=client_of(request)[:128],
                # 0: the client went away before the answer.
                http=status,
                outcome=request.get(_OUTCOME),
                bytes=request.content_length,
                seconds=round(time.monotonic() - started, 4),
            )

    return [guarded]


class Protocol(web.RequestHandler):
    """aiohttp's, with JSON for the answers that it gives without the application, and a header for all."""

    def __init__(self, *args: Any, isolation: str, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._isolation = isolation

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is already sent")
        if status >= 500:
            log.logger.error("a request failed in the server", exc_info=exc)
        else:
            # Without the message, which quotes the request.
            log.event("malformed", http=status)
        response = failure(status, (message or "the server failed to answer; see its log").partition("\n")[0])
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log nothing: aiohttp would quote requests, and the middleware logs what fails in the server."""

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):
            resp = failure(resp.status, resp.reason)
        resp.headers[ISOLATION_HEADER] = self._isolation
        return await super().finish_response(request, resp, start_time)


def note_outcome(request: web.Request, outcome: str) -> None:
    """Record the outcome for the log."""
    request[_OUTCOME] = outcome


def client_of(request: web.Request) -> str:
    """Return the client that a request counts for: its address, or its process on a UNIX socket, and there its header,
    which names no client of another address or process."""
    name = request.headers.get(CLIENT_HEADER)
    return f"{_peer(request)} {name}" if name else _peer(request)


def _peer(request: web.Request) -> str:
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if isinstance(peer, tuple):
        return str(peer[0])
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is not None and connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return f"pid {struct.unpack('3i', credentials)[0]}"
    return ""


def failure(status: int, detail: Any, **headers: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status, headers=headers)


def _refuse(request: web.Request, token: str) -> web.Response | None:
    # With a token, too: a browser adds the one of a URL that its user once opened to requests of other pages.
    if is_from_page(request):
        return failure(403, "requests of web pages are refused")
    if token:
        if hmac.compare_digest(_sent_token(request).encode("utf-8", "replace"), token.encode()):
            return None
        return failure(401, "missing or wrong token; send Authorization: Bearer TOKEN, or use http://token:TOKEN@HOST")
    if not is_for_loopback(request):
        return failure(403, "without a token this server answers requests to localhost only")
    return None


def _sent_token(request: web.Request) -> str:
    """Return the token, "" if there is none. Clients that take one URL send the password in it as basic authentication;
    the user name does not matter."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value
    try:
        return BasicAuth.decode(f"{kind} {value}", "utf-8").password
    except ValueError:
        return ""


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Invalid as error:
        response = failure(error.status, error.detail)
        if error.status in (400, 408, 413, 415):
            # The rest of the body need not be read.
            response.force_close()
        return response
    except Overloaded as error:
        # The only status that SandboxFusion's clients retry.
        return failure(504, str(error), **{"Retry-After": "1"})
    except NoSession as error:
        return failure(404, str(error))
    except web.HTTPException as error:
        headers = {name: value for name, value in error.headers.items() if name == "Allow"}
        return failure(error.status, error.reason, **headers)
    except Exception:
        log.logger.error("a request failed in the server", exc_info=True)
        return failure(500, "the server failed to answer; see its log")
