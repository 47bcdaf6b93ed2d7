"""An event loop in a thread of its own, for async user code that may block it.

Invariant: what runs there can hold up nobody else, and takes no descriptor but those that it opens itself. Code that
neither awaits nor ends cannot be stopped: its thread is left behind, as that of a sync function is.
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
    """Started by the first coroutine, and ended by `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await user code there. If this is cancelled, the code is cancelled there, as `guarded` does it, and waited
        for: not longer than `guarded` gives it, since it may be blocking its loop."""
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
                done.exception()  # asyncio complains about one that nobody has looked at
            raise
        return done.result()

    def close(self) -> None:
        """Cancel what still runs there, and end the thread as soon as it lets go."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class _Work:
    """A task on another thread's loop; `done` has its result."""

    def __init__(self, loop: asyncio.AbstractEventLoop, awaitable: Awaitable[Any]):
        self.done: Future[Any] = Future()
        self._loop, self._awaitable = loop, awaitable
        self._task: asyncio.Task | None = None
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())

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
        task._log_destroy_pending = False
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


class OnLoop:
    """An object whose async methods run on the loop on which this was made, whichever loop awaits them: connections and
    limits that belong to one loop then serve all."""

    def __init__(self, target: Any) -> None:
        self._target, self._home = target, asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return self._at_home(found) if inspect.iscoroutinefunction(found) else found

    def _at_home(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if asyncio.get_running_loop() is self._home:
                return await method(*args, **kwargs)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._home))

        return call
