"""SIGINT and SIGTERM in a run.

Invariant: the first signal ends the run in order, whatever it is doing: SIGINT gives up what is under way; so does
SIGTERM, but where training has asked for notice it may end in its own time, with a checkpoint. A second signal ends the
process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The run was given up because of a signal; `exit_code` is the shell's for it."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class Stopped(Exception):
    """What training was waiting for was given up, so that it can end in order."""


class Interruption:
    """`with Interruption() as stop: asyncio.run(stop.run(work(stop)))`. Signals are handled in the main thread only;
    elsewhere nothing is installed."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.summary = ""
        """How a run that SIGTERM stopped has ended; "" for one that did all its work."""
        self.way_back = "nothing was trained"
        """How a run that is given up goes on."""
        self._task: asyncio.Task | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notice: asyncio.Event | None = None
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has asked training to end."""
        return self._notice is not None and self._notice.is_set()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            # one that is ignored was meant to be, as under nohup
            self._before = {number: before for number, before in handlers.items() if before is not signal.SIG_IGN}
            self.install()
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals again from a library that has put its own handlers there, as ray.init does."""
        for number in self._before:
            signal.signal(number, self._handle)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`. Raises Interrupted where a signal has ended it."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for number in self._before:
            # so that a signal wakes the loop even where it comes just before the loop goes to sleep
            self._loop.add_signal_handler(number, _pass)
        self.install()
        try:
            return await work
        except asyncio.CancelledError:
            if self.signum is None:
                raise
            raise Interrupted(self.signum) from None
        except SystemExit as error:
            # ray.init has a handler of its own for SIGTERM from before it connects: `sys.exit(signum)`
            if self.signum is not None or error.code != signal.SIGTERM:
                raise
            self.signum = signal.SIGTERM
            raise Interrupted(signal.SIGTERM) from None
        finally:
            self._task = None
            for number in self._before:
                self._loop.remove_signal_handler(number)
            self.install()

    def take_notice(self) -> None:
        """From now on SIGTERM sets `asked` and ends `until_asked`, and cancels nothing else."""
        self._notice = asyncio.Event()

    async def until_asked(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, which is cancelled where SIGTERM comes first. Raises Stopped then."""
        if self._notice is None:
            return await work
        task, notice = asyncio.ensure_future(work), asyncio.ensure_future(self._notice.wait())
        try:
            await asyncio.wait((task, notice), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            notice.cancel()
            task.cancel()
            await asyncio.gather(task, notice, return_exceptions=True)

    def _handle(self, signum: int, _frame: object) -> None:
        if self.signum is not None:
            print("ended at once by a second signal", file=sys.stderr, flush=True)
            os._exit(128 + signum)
        self.signum = signum
        if self._task is None:
            raise Interrupted(signum)
        in_order = signum == signal.SIGTERM and self._notice is not None
        self._loop.call_soon_threadsafe(self._notice.set if in_order else self._task.cancel)


def _pass() -> None:
    """Do nothing: `Interruption._handle` has run by then."""
