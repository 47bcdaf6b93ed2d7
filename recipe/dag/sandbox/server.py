"""A SandboxFusion-compatible server for one run: POST /run_code, GET /v1/ping, GET /v1/status.

Invariant: it listens on the loopback address only, ends when its parent does, and leaves no process or file of a job
behind. A full queue is answered with 504, the one status that SandboxFusion's clients try again.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hmac
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from aiohttp import web

from recipe.dag.sandbox import wire
from recipe.dag.sandbox.execute import Executor, SandboxError
from recipe.dag.sandbox.limits import Limits

_MAX_BODY_BYTES = 32 << 20
_HOST = "127.0.0.1"


class SandboxServer:
    """Runs at most `max_concurrent` programs; `max_queue` more may wait. A program's time starts when it does."""

    def __init__(
        self, executor: Executor, *, max_concurrent: int, max_queue: int, limits: Limits = Limits(), token: str = ""
    ):
        self._executor = executor
        self._slots = asyncio.Semaphore(max_concurrent)
        self._max_queue = max_queue
        self._limits = limits
        self._token = token
        self._waiting = 0
        self._running = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._authorize])
        app.add_routes(
            [web.post("/run_code", self.run_code), web.get("/v1/ping", self.ping), web.get("/v1/status", self.status)]
        )
        return app

    async def ping(self, _request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def status(self, _request: web.Request) -> web.Response:
        isolation = self._executor.isolation
        return web.json_response({"queue": self._waiting, "running": self._running, "isolation": isolation})

    async def run_code(self, request: web.Request) -> web.Response:
        try:
            job = wire.parse_request(json.loads(await request.read()))
        except wire.Invalid as error:
            return web.json_response({"detail": error.detail}, status=422)
        except (ValueError, RecursionError):
            return web.json_response({"detail": wire.Invalid((), "the body is not JSON").detail}, status=422)
        if self._slots.locked() and self._waiting >= self._max_queue:
            return _overloaded(f"{self._waiting} programs are waiting already")
        # Clients give up compile_timeout + 10 s after the time that they grant the program itself.
        patience = min(max(job.compile_timeout, 0) + 8, 30)
        self._waiting += 1
        try:
            await asyncio.wait_for(self._slots.acquire(), patience)
        except TimeoutError:
            return _overloaded(f"no slot became free within {patience:g} s")
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            return web.json_response(await self._execute(job))
        finally:
            self._running -= 1
            self._slots.release()

    async def _execute(self, job: wire.RunCodeRequest) -> dict:
        memory_mb = job.memory_limit_MB if job.memory_limit_MB > 0 else self._limits.memory_mb
        try:
            execution = await self._executor.execute(
                job.code,
                job.language,
                job.run_timeout,
                job.stdin,
                job.files,
                dataclasses.replace(self._limits, memory_mb=memory_mb),
                compile_timeout_s=job.compile_timeout,
                fetch=job.fetch_files,
            )
        except (SandboxError, OSError) as error:
            return wire.refusal(f"{type(error).__name__}: {error}")
        return wire.answer(execution)

    @web.middleware
    async def _authorize(self, request: web.Request, handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return web.json_response({"detail": "missing or wrong token"}, status=401)
        return await handler(request)


def _overloaded(message: str) -> web.Response:
    return web.json_response({"detail": message}, status=504, headers={"Retry-After": "1"})


async def serve(arguments: argparse.Namespace, root: Path, token: str) -> None:
    """Serve until SIGTERM, SIGINT, or the end of stdin with --parent-stdin."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if arguments.parent_stdin:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    server = SandboxServer(
        Executor(root, exclusive=True),
        max_concurrent=arguments.max_concurrent,
        max_queue=arguments.max_queue,
        token=token,
    )
    # A client that hangs up, or the end of the server, cancels the handler, which kills the job.
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, _HOST, arguments.port, backlog=1024)
        await site.start()
        port = runner.addresses[0][1]
        url = f"http://{_HOST}:{port}"
        print(json.dumps({"url": url, "port": port, "pid": os.getpid(), "isolation": Executor.isolation}), flush=True)
        await stop.wait()
    finally:
        if arguments.parent_stdin:
            loop.remove_reader(0)
        await runner.cleanup()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipe.dag.sandbox.server", description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--port", type=int, default=8080, help="0 picks a free one; the first line of stdout says which"
    )
    parser.add_argument(
        "--max-concurrent", type=int, default=cores, help="programs at once (default: the cores, %(default)s)"
    )
    parser.add_argument("--max-queue", type=int, default=1024, help="programs that may wait (default %(default)s)")
    parser.add_argument(
        "--root", type=Path, help="existing directory to work in (default: a fresh one, removed at the end)"
    )
    parser.add_argument(
        "--parent-stdin",
        action="store_true",
        help="the first line of stdin is the token to ask for; end when stdin does",
    )
    arguments = parser.parse_args(argv)
    if arguments.max_concurrent < 1 or arguments.max_queue < 0:
        parser.error("--max-concurrent must be at least 1 and --max-queue at least 0")
    token = _first_line(0) if arguments.parent_stdin else ""
    root = arguments.root or Path(tempfile.mkdtemp(prefix="verl-dag-sandbox-"))
    try:
        asyncio.run(serve(arguments, root, token))
    except OSError as error:
        sys.exit(f"sandbox: {error}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _first_line(descriptor: int) -> str:
    """Read byte by byte: what follows belongs to whoever reads next."""
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


if __name__ == "__main__":
    main()
