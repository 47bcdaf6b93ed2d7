"""An event loop in its own thread, for async user code that may block.

Invariant: code that runs there cannot hold up any other episode, and uses no descriptors except those that it opens.
Code that neither awaits nor ends cannot be stopped: its thread is abandoned, like that of a sync function.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from recipe.dag.episode import tasks
from recipe.dag.episode.light_loop import LightLoop


class OwnLoop:
    """Started by the first coroutine, ended by `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await user code on the loop. If this is cancelled, the code is cancelled as in `guarded` and awaited, for at
        most the time that `guarded` allows, since it may be blocking its loop."""
        if self._loop is None:
            self._loop = LightLoop()
            threading.Thread(target=_serve, args=(self._loop,), daemon=True, name="episode-env").start()
        work = _Work(self._loop, awaitable)
        done = asyncio.wrap_future(work.done)
        try:
            await asyncio.wait({done})
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({done}, timeout=tasks.CLEAN_UP_S + sum(tasks.STUBBORN_S))
            if done.done() and not done.cancelled():
                done.exception()  # asyncio logs an exception that is never retrieved
            raise
        return done.result()

    def close(self) -> None:
        """Cancel what still runs there, and end the thread once that has ended."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class _Work:
    """A task on another thread's loop; `done` receives its result."""

    def __init__(self, loop: asyncio.AbstractEventLoop, awaitable: Awaitable[Any]):
        self.done: Future[Any] = Future()
        self._loop, self._awaitable = loop, awaitable
        self._task: asyncio.Task | None = None
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._close_unstarted)

    def _close_unstarted(self, _task: asyncio.Task) -> None:
        """Close code that was cancelled before its first step, of which Python would warn."""
        code = self._awaitable
        if inspect.iscoroutine(code) and inspect.getcoroutinestate(code) == inspect.CORO_CREATED:
            code.close()

    async def _run(self) -> None:
        try:
            result = await tasks.guarded(_plain(self._awaitable))
        except asyncio.CancelledError:
            self.done.cancel()
            raise
        except Exception as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


async def _plain(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as raised:
        raise tasks.plain_error(raised) from raised


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
        tasks.silence(task)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


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
