"""`verl-dag watch`: the page of runs while they go on, served to this machine's browser.

Invariant: reads the runs' folders and answers GET with the page or with a part of its data, to requests that name a
loopback address as their host, that no other web page sent, and that know a token: all users of this machine reach its
ports.
"""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from recipe.dag.core.errors import UserError
from recipe.dag.report.jsonfile import to_json
from recipe.dag.report.viewer.live import LiveRun
from recipe.dag.report.viewer.page import live_page
from recipe.dag.tools.sandbox import is_for_loopback, is_from_page

_ASK = "open the address that verl-dag watch printed"
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}


def application(folders: Sequence[Path], token: str) -> web.Application:
    """Return an application with the page at `/TOKEN/`, and below it the data: `RUN/news?since=VERSION`, `RUN/PART`."""
    page = live_page(folders)
    runs = [(LiveRun(folder), threading.Lock()) for folder in folders]

    async def get_page(request: web.Request) -> web.Response:
        return web.Response(body=page, content_type="text/html", charset="utf-8")

    async def get_news(request: web.Request) -> web.Response:
        return await answer(request, lambda run: run.news(request.query.get("since", "")))

    async def get_part(request: web.Request) -> web.Response:
        return await answer(request, lambda run: run.part(request.match_info["part"]))

    async def get_icon(request: web.Request) -> web.Response:
        return web.Response(status=204)  # a browser asks for it, and reports an error if it is missing

    async def answer(request: web.Request, read: Callable[[LiveRun], Any]) -> web.Response:
        try:
            run, lock = runs[int(request.match_info["run"])]
            data = await asyncio.to_thread(_packed, read, run, lock)
        except (KeyError, IndexError):
            raise web.HTTPNotFound from None
        except ValueError:
            raise web.HTTPBadRequest from None
        except UserError as error:
            raise web.HTTPInternalServerError(text=str(error)) from error
        if data is None:
            return web.Response(status=204)
        return web.Response(body=data, content_type="application/json", headers={"Content-Encoding": "gzip"})

    app = web.Application(middlewares=[_guarded])
    app.router.add_get("/favicon.ico", get_icon)
    app.router.add_get(f"/{token}/", get_page)
    app.router.add_get(f"/{token}" r"/{run:\d}/news", get_news)
    app.router.add_get(f"/{token}" r"/{run:\d}/{part}", get_part)
    return app


def _packed(read: Callable[[LiveRun], Any], run: LiveRun, lock: threading.Lock) -> bytes | None:
    with lock:  # held by the thread: it goes on reading when its client has gone and the request is cancelled
        data = read(run)
    return None if data is None else gzip.compress(to_json(data), 6)


@web.middleware
async def _guarded(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    try:
        if is_from_page(request) or not is_for_loopback(request):
            raise web.HTTPForbidden(text=_ASK)
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status, text=_ASK if error.status == 404 else error.text)
    response.headers.update(_HEADERS)
    return response
