"""Waiting for other code: several coroutines at once, for a limited time, or for code that blocks.

Invariant: when a function here returns or raises, no coroutine that it started is still running. Only what cannot be
stopped goes on, and nobody waits for it, not even the end of the process: a blocking function, in a daemon thread that
it keeps, and a coroutine of the user's that catches every cancellation.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from recipe.dag.episode.threads import WorkerThreads
from recipe.dag.errors import Fault

log = logging.getLogger(__name__)
_threads = WorkerThreads()

CLEAN_UP_S = 5.0
STUBBORN_S = (0.2, 0.2, 0.2)
"""After the second cancellation, the third and the fourth."""

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, "Iterable[Work]"]]
"""A step that says which steps come after it."""


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first that raises cancels the others; it is raised as it is, not in a group.

    Not asyncio.TaskGroup: before Python 3.13 a failure inside leaves the caller marked as cancelled, and it lets a
    failure hide that the caller really was.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await _all(tasks, asyncio.FIRST_EXCEPTION, lambda _: [])
    return [task.result() for task in tasks]


async def unfold(works: Iterable[Work]) -> None:
    """Run all `works` at once, then at once whatever each of them returns, until none is left. The first that raises
    cancels the others; it is raised as it is."""
    tasks = [asyncio.create_task(work()) for work in works]
    await _all(tasks, asyncio.FIRST_COMPLETED, lambda over: [asyncio.create_task(work()) for work in over.result()])


async def _all(tasks: list[asyncio.Task], when: str, after: Callable[[asyncio.Task], list[asyncio.Task]]) -> None:
    """Wait for `tasks` and those that come `after` them, which are added to the list. `when`: of asyncio.wait, how soon
    to look at what is over. Of several that fail together the first in the list is raised."""
    pending, failed, cancelled = set(tasks), None, None
    while pending:
        try:
            done, pending = await asyncio.wait(pending, return_when=when)
        except asyncio.CancelledError as error:
            done, cancelled = set(), error
        over = [task for task in tasks if task in done]
        # All of them are asked: asyncio complains about an exception that nobody has looked at.
        broken = [task for task in over if _failed(task)]
        failed = failed or next(iter(broken), None)
        if failed or cancelled:
            for task in pending:
                task.cancel()
        else:
            new = [following for task in over for following in after(task)]
            tasks += new
            pending |= set(new)
    if cancelled:
        raise cancelled
    if failed:
        failed.result()


def _failed(task: asyncio.Task) -> bool:
    return task.cancelled() or task.exception() is not None


@asynccontextmanager
async def limited(seconds: float, fault: type[Fault], what: str, where: str = "") -> AsyncIterator[None]:
    """Cancel the body after `seconds` and raise `fault`. A TimeoutError of the body's own making passes through."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise fault(f"{what} took longer than {seconds:.3g} s", where=where, time_limit=True) from error


async def guarded(awaitable: Awaitable[T]) -> T:
    """Await user code. If this is cancelled, the user's code is cancelled and has CLEAN_UP_S to end; code that catches
    the cancellation and goes on (a bare `except:` in a loop) is cancelled some more and then left alone."""

    async def body() -> T:
        return await awaitable

    task = asyncio.create_task(body())
    try:
        await asyncio.wait({task})
    finally:
        await _stop(task)
    return task.result()


async def _stop(task: asyncio.Task) -> None:
    for seconds in (CLEAN_UP_S, *STUBBORN_S):
        if task.done():
            break
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            continue  # of ours, again: whoever waits gets the first one, and the task is pressed on
    if task.done():
        _failed(task)  # asked, since asyncio complains about an exception that nobody has looked at
        return
    log.warning("left behind, since it catches every cancellation: %s", task.get_coro().cr_await)
    asyncio._unregister_task(task)  # or asyncio.run would wait for it at its end
    task._log_destroy_pending = False


async def invoke(
    function: Callable[..., Any],
    *args: Any,
    awaited: Callable[[Awaitable[Any]], Awaitable[Any]] = guarded,
    **kwargs: Any,
) -> Any:
    """Call user code without letting it block the loop: coroutine functions run where `awaited` awaits them, by default
    here, all others in a thread. Calls that hang keep their threads, and hold up no others."""
    if not inspect.iscoroutinefunction(function):
        result = await _in_thread(lambda: function(*args, **kwargs))
    else:
        result = function(*args, **kwargs)
    return await awaited(result) if inspect.isawaitable(result) else result


def plain_error(raised: BaseException) -> Exception:
    """A future refuses StopIteration, and SystemExit out of a task would end the loop."""
    plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
    return raised if plain else RuntimeError(repr(raised))


async def _in_thread(function: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = plain_error(raised)
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # The loop has closed: nobody waits any more.

    _threads.run(work)
    return await future
