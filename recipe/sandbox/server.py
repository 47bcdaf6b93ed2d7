"""The server's process: engine, listener, signals and cleanup.

Invariant: without a token it listens on the loopback address, with isolation, or on a UNIX socket only; it never runs
below the requested isolation; and when it has ended, killed or not, none of its jobs and files is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from recipe.sandbox import engines, log
from recipe.sandbox.errors import CannotIsolate, CannotStart
from recipe.sandbox.fair_queue import FairQueue, default_slots
from recipe.sandbox.guard import Protocol
from recipe.sandbox.jobs import Jobs
from recipe.sandbox.limits import Limits
from recipe.sandbox.open_files import raise_limit
from recipe.sandbox.outcome import Unavailable
from recipe.sandbox.removal import start_reaper
from recipe.sandbox.routes import Routes
from recipe.sandbox.sessions import Sessions
from recipe.sandbox.web_pages import is_loopback

_REAPER_S = 10.0
_IDLE_S = 75.0
"""How long a connection may stay open without a complete request."""
_LINGER_S = 3.0
"""How long a refused body is still read, so that its sender receives the answer."""


@dataclass(frozen=True)
class Options:
    """The server's options. port: 0 picks a free one. socket: a path to listen on instead of host and port. grace_s:
    how long running jobs may continue after SIGTERM."""

    host: str = "127.0.0.1"
    port: int = 8080
    socket: str | None = None
    isolation: str = "auto"
    accept_unsandboxed: bool = False
    max_concurrent: int = 0
    max_queue: int = 1024
    memory_mb: int = 1024
    max_memory_mb: int = 8192
    max_sessions: int = 1024
    sessions_mb: int = 8192
    grace_s: float = 5.0
    log_level: str = "info"


def check(options: Options, *, with_token: bool) -> None:
    """Raise CannotStart for options that are invalid or unsafe."""
    if not (options.socket or with_token):
        if not is_loopback(options.host):
            raise CannotStart(
                f"the sandbox runs every program that it is sent: to listen on {options.host} it needs a token; "
                "without one, use --host 127.0.0.1 or --socket"
            )
        if options.isolation == "rlimits":
            raise CannotStart(
                "with --isolation=rlimits every program of this machine's users could run as this user: "
                "the server needs a token or --socket"
            )
    if not 0 <= options.port < 1 << 16:
        raise CannotStart(f"--port must be at least 0 and at most 65535, not {options.port}")
    for name, least in (("max_concurrent", 0), ("max_queue", 0), ("memory_mb", 16), ("max_sessions", 0)):
        if getattr(options, name) < least:
            raise CannotStart(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(options, name)}")


def run(options: Options, read_token: Callable[[], str], announce: Callable[[dict[str, Any]], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotStart when it cannot start."""
    log.set_up(options.log_level)
    raise_limit()  # each job takes several descriptors, each client one
    root = tempfile.mkdtemp(prefix="verl-dag-sandbox-")
    reaper = start_reaper(root)
    assert reaper.stdin is not None  # a pipe
    try:
        asyncio.run(_serve(options, Path(root), read_token, announce))
    except Unavailable as error:
        raise CannotIsolate(f"the sandbox cannot start with isolation {options.isolation}: {error}") from None
    except OSError as error:
        raise CannotStart(f"the sandbox cannot listen or work: {error}") from None
    finally:
        reaper.stdin.close()
        # If it takes longer, the reaper finishes on its own.
        with suppress(subprocess.TimeoutExpired):
            reaper.wait(_REAPER_S)


async def _serve(
    options: Options, root: Path, read_token: Callable[[], str], announce: Callable[[dict[str, Any]], None]
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = await engines.start(options.isolation, options.accept_unsandboxed, root=root)
    sessions = None
    try:
        # Read only now, so that the token is not in the memory of processes that the engine forked.
        token = read_token()
        queue = FairQueue(options.max_concurrent or default_slots(), options.max_queue)
        sessions = Sessions(engine.store, max_sessions=options.max_sessions, max_bytes=options.sessions_mb << 20)
        sessions.start()
        limits = Limits(memory_mb=options.memory_mb)
        jobs = Jobs(engine, queue, sessions, limits, max_memory_mb=options.max_memory_mb)
        # handler_cancellation: a client that hangs up cancels the handler, which kills the job.
        runner = web.AppRunner(Routes(jobs, token).app(), handler_cancellation=True, shutdown_timeout=options.grace_s)
        await runner.setup()
        listener = None
        try:
            listener, address = await _listen(runner, options, engine.isolation)
            memory = engine.status()["memory"]
            facts = {**address, "isolation": engine.isolation, "memory": memory, "slots": queue.slots}
            announce(facts | {"root": str(root)})
            log.event("listening", **facts, pid=os.getpid())
            await stop.wait()
            log.event("stopping", running=queue.running, queue=queue.waiting)
            queue.close()
        finally:
            if listener is not None:
                if options.socket:
                    with suppress(OSError):
                        os.unlink(options.socket)
                listener.close()
            await runner.cleanup()
    finally:
        await engine.close()
        if sessions is not None:
            await sessions.close()


async def _listen(runner: web.AppRunner, options: Options, isolation: str) -> tuple[asyncio.Server, dict[str, Any]]:
    """Start to listen; return the listener and the address. Raises OSError, CannotStart."""
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None  # it is set up

    def protocol() -> Protocol:
        options: dict[str, Any] = {"lingering_time": _LINGER_S, "keepalive_timeout": _IDLE_S, "auto_decompress": False}
        return Protocol(server, loop=loop, isolation=isolation, **options)

    if options.socket is None:
        listener = await loop.create_server(protocol, options.host, options.port, backlog=1024)
        port = listener.sockets[0].getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        return listener, {"url": f"http://{host}:{port}", "port": port}
    # asyncio replaces a socket at the path, also that of a server that runs.
    with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError, ConnectionRefusedError):
        probe.connect(options.socket)
        raise CannotStart(f"--socket {options.socket}: another server listens there; pass another path")
    before = os.umask(0o177)
    try:
        listener = await loop.create_unix_server(protocol, options.socket, backlog=1024)
    finally:
        os.umask(before)
    return listener, {"socket": options.socket}
