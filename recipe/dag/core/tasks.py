"""Awaits other code: several coroutines at once, code with a time limit, code that may block.

Invariant: when a function here returns or raises, no coroutine that it started is still running. The exceptions are
code that cannot be stopped: a blocking function, which keeps its daemon thread, and a user's coroutine that catches
every cancellation. Nothing waits for these, not even the end of the process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from recipe.dag.core.errors import Fault
from recipe.dag.core.threads import WorkerThreads
from recipe.dag.core.time_limit import TimeLimit

log = logging.getLogger(__name__)
_threads = WorkerThreads()

CLEAN_UP_S = 5.0
"""Seconds that cancelled user code has to end."""
STUBBORN_S = (0.2, 0.2, 0.2)
"""Seconds to wait after the second, third and fourth cancellation."""

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, "Iterable[Work]"]]
"""Starts a step, which returns the steps that follow it."""


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results, in order. The first coroutine that raises cancels the others; its exception is raised as it
    is, not in a group.

    Not asyncio.TaskGroup: before Python 3.13 a failure inside leaves the caller marked as cancelled, and a failure can
    hide a real cancellation of the caller.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await _all(tasks, asyncio.FIRST_EXCEPTION, lambda _: [])
    return [task.result() for task in tasks]


async def unfold(works: Iterable[Work]) -> None:
    """Run all `works` concurrently, start those that each one returns as soon as it ends, and return when none is left.
    The first that raises cancels the others; its exception is raised as it is."""
    tasks = [asyncio.create_task(work()) for work in works]
    await _all(tasks, asyncio.FIRST_COMPLETED, lambda ended: [asyncio.create_task(work()) for work in ended.result()])


async def _all(tasks: list[asyncio.Task], when: str, after: Callable[[asyncio.Task], list[asyncio.Task]]) -> None:
    """Wait for `tasks` and for those that `after` returns for each of them, which are added to the list. `when`: the
    `return_when` of asyncio.wait. Of several that fail together, the first in the list is raised."""
    pending, failed, cancelled = set(tasks), None, None
    while pending:
        try:
            done, pending = await asyncio.wait(pending, return_when=when)
        except asyncio.CancelledError as error:
            done, cancelled = set(), error
        ended = [task for task in tasks if task in done]
        # All of them are checked, since asyncio logs an exception that is never retrieved.
        broken = [task for task in ended if has_failed(task)]
        failed = failed or next(iter(broken), None)
        if failed or cancelled:
            for task in pending:
                task.cancel()
        else:
            new = [following for task in ended for following in after(task)]
            tasks += new
            pending |= set(new)
    if cancelled:
        raise cancelled
    if failed:
        failed.result()


def has_failed(task: asyncio.Task) -> bool:
    """Return whether an ended task has no result. asyncio logs an exception that is never retrieved; this does so."""
    return task.cancelled() or task.exception() is not None


@asynccontextmanager
async def limited(seconds: float, fault: type[Fault], what: str, where: str = "") -> AsyncIterator[TimeLimit]:
    """Cancel the body after `seconds`, in which `time_limit.waiting` does not count, and raise `fault`. A TimeoutError
    that the body itself raises passes through."""
    limit = TimeLimit(seconds)
    try:
        async with limit.running():
            yield limit
    except TimeoutError as error:
        if not limit.expired:
            raise
        raise fault(f"{what} took longer than {seconds:.3g} s", where=where, time_limit=True) from error


async def guarded(awaitable: Awaitable[T]) -> T:
    """Await user code. If this is cancelled, the user's code is cancelled and has CLEAN_UP_S to end; code that catches
    the cancellation and continues (a bare `except:` in a loop) is cancelled a few more times and then abandoned."""

    async def body() -> T:
        try:
            return await awaitable
        except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as raised:  # as of `sys.exit`, which would end the loop
            raise _plain_error(raised) from raised

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
            continue  # we were cancelled again; the first cancellation is raised in any case, so keep stopping the task
    if task.done():
        has_failed(task)  # asyncio logs an exception that is never retrieved
        return
    log.warning("abandoned, since it catches every cancellation: %s", getattr(task.get_coro(), "cr_await", task))
    asyncio._unregister_task(task)  # otherwise asyncio.run would wait for it at its end
    silence(task)


_LOGS_PENDING = "_log_destroy_pending"


def silence(task: asyncio.Task) -> None:
    """Keep asyncio from logging that the task was still pending when it is destroyed."""
    setattr(task, _LOGS_PENDING, False)


async def invoke(
    function: Callable[..., Any],
    *args: Any,
    awaited: Callable[[Awaitable[Any]], Awaitable[Any]] = guarded,
    **kwargs: Any,
) -> Any:
    """Call user code without letting it block the loop. A coroutine function runs where `awaited` awaits it, by default
    on this loop; any other function runs in a thread. A call that hangs keeps its thread and holds up no other call."""
    if not inspect.iscoroutinefunction(function):
        result = await _in_thread(lambda: function(*args, **kwargs))
    else:
        result = function(*args, **kwargs)
    return await awaited(result) if inspect.isawaitable(result) else result


def _plain_error(raised: BaseException) -> Exception:
    """Return an exception that a future can hold: it refuses StopIteration, and SystemExit in a task would end the
    loop."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    return RuntimeError(repr(raised))


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
            error = _plain_error(raised)
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop has closed: nothing is waiting any more

    _threads.run(work)
    return await future
