"""Event loops: those that async envs share, in threads, and a watch on each loop for code that blocks it.

Invariant: all coroutines of an env run on one loop, which is not that of the episodes: code that blocks holds up the
envs of its loop, and nothing else. As it cannot be stopped, its loop gets no further envs, and its thread is abandoned.
A loop without envs ends.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from recipe.dag.core import tasks

log = logging.getLogger(__name__)

SHARED = 4
"""Number of loops that envs share."""
BLOCKED_S = 20.0
"""Seconds that a loop may be blocked before a warning is logged."""
SHOWN_FRAMES = 4
"""Number of innermost frames in that warning."""

_lock = threading.Lock()
_envs: dict[asyncio.AbstractEventLoop, int] = {}
"""The number of envs of each loop of this process that envs share."""
_blocked: set[asyncio.AbstractEventLoop] = set()
"""Those of them that get no further envs."""


class EnvLoop:
    """The loop of one env: joined by its first coroutine, left by `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await user code on the loop. If this is cancelled, the code is cancelled as in `guarded` and awaited, for at
        most the time that `guarded` allows, since the loop may be blocked."""
        loop = self._loop = self._loop or _join()
        started: list[asyncio.Task] = []
        ended: Future[None] = Future()

        def start() -> None:
            started.append(loop.create_task(tasks.guarded(awaitable)))
            started[0].add_done_callback(end)

        def end(task: asyncio.Task) -> None:
            tasks.has_failed(task)  # asyncio logs an exception that is never retrieved
            if inspect.iscoroutine(awaitable) and inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED:
                awaitable.close()  # it was cancelled before its first step, of which Python would warn
            ended.set_result(None)

        loop.call_soon_threadsafe(start)
        done = asyncio.wrap_future(ended)
        try:
            await asyncio.wait({done})
        except asyncio.CancelledError:
            loop.call_soon_threadsafe(lambda: started[0].cancel())
            await asyncio.wait({done}, timeout=tasks.CLEAN_UP_S + sum(tasks.STUBBORN_S))
            if not done.done():
                _blocked.add(loop)
            raise
        return started[0].result()

    def close(self) -> None:
        """Leave the loop. What still runs there is cancelled when its last env leaves it."""
        if self._loop is not None:
            _leave(self._loop)
            self._loop = None


def _join() -> asyncio.AbstractEventLoop:
    """Return the loop with the fewest envs, or a new one."""
    with _lock:
        loops = _envs.keys() - _blocked
        if len(loops) < SHARED:
            loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), daemon=True, name="episode-envs").start()
        else:
            loop = min(loops, key=_envs.__getitem__)
        _envs[loop] = _envs.get(loop, 0) + 1
        return loop


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    with _lock:
        _envs[loop] -= 1
        if not _envs[loop]:
            del _envs[loop]
            _blocked.discard(loop)
            loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    with watched(loop, "all envs of one event loop"):
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            tasks.silence(task)
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@contextmanager
def watched(loop: asyncio.AbstractEventLoop, waiting: str) -> Iterator[None]:
    """Log the stack of this thread, which runs the loop, once each time that the loop is blocked for BLOCKED_S.

    An async function that blocks (`time.sleep`, a loop that never awaits) holds up all that the loop runs (`waiting`)
    and cannot be stopped from outside, so the log is what tells the user which line it is.
    """
    thread_id = threading.get_ident()
    ended, pause, last_beat = threading.Event(), BLOCKED_S / 4, time.monotonic()

    def beat() -> None:
        nonlocal last_beat, timer
        last_beat = time.monotonic()
        timer = loop.call_later(pause, beat)

    def watch() -> None:
        reported = 0.0
        while not ended.wait(pause):
            if time.monotonic() - last_beat > BLOCKED_S and reported != last_beat:
                reported = last_beat
                frames = "".join(traceback.format_stack(sys._current_frames().get(thread_id))[-SHOWN_FRAMES:])
                advice = "async code must not block; write a plain function, which runs in its own thread"
                log.warning("%s wait for this, for %.0f s now (%s):\n%s", waiting, BLOCKED_S, advice, frames)

    timer = loop.call_later(pause, beat)
    threading.Thread(target=watch, daemon=True, name="episode-watch").start()
    try:
        yield
    finally:
        ended.set()
        timer.cancel()


class OnLoop:
    """A proxy whose async methods run on the loop on which it was created, whichever loop awaits them, so that
    connections and limits that are bound to one loop can serve all."""

    def __init__(self, target: Any) -> None:
        self._target, self._loop = target, asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._target, name)
        return self._on_loop(attribute) if inspect.iscoroutinefunction(attribute) else attribute

    def _on_loop(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if asyncio.get_running_loop() is self._loop:
                return await method(*args, **kwargs)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop))

        return call
