"""SIGINT and SIGTERM during a run.

Invariant: the first signal ends the run in order, whatever it is doing. SIGINT cancels the current work; so does
SIGTERM, unless training has called `take_notice`: then it finishes with a checkpoint. A second signal ends the process
immediately.
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
    """A signal ended the run; `exit_code` is the shell's code for it."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class Stopped(Exception):
    """The work that training awaited was cancelled, so that training can end in order."""


class Interruption:
    """`with Interruption() as stop: asyncio.run(stop.run(work(stop)))`. Installs handlers only in the main thread."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.summary = ""
        """How a run ended that SIGTERM stopped; "" if the run was completed."""
        self.way_back = "nothing was trained"
        """How to continue a run that is interrupted."""
        self._task: asyncio.Task | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notice: asyncio.Event | None = None
        self._previous: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """True once SIGTERM has asked training to end."""
        return self._notice is not None and self._notice.is_set()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            # an ignored signal is ignored on purpose, as under nohup
            self._previous = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
            self.install()
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Install the handlers again after a library has replaced them, as ray.init does."""
        for number in self._previous:
            signal.signal(number, self._handle)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`. Raises Interrupted if a signal ended it."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for number in self._previous:
            # makes a signal wake the loop even if it arrives just before the loop sleeps
            self._loop.add_signal_handler(number, _pass)
        self.install()
        try:
            return await work
        except asyncio.CancelledError:
            if self.signum is None:
                raise
            raise Interrupted(self.signum) from None
        except SystemExit as error:
            # before ray.init connects, it has its own SIGTERM handler: `sys.exit(signum)`
            if self.signum is not None or error.code != signal.SIGTERM:
                raise
            self.signum = signal.SIGTERM
            raise Interrupted(signal.SIGTERM) from None
        finally:
            self._task = None
            for number in self._previous:
                self._loop.remove_signal_handler(number)
            self.install()

    def take_notice(self) -> None:
        """Make SIGTERM set `asked` and end `until_asked` from now on, and cancel nothing else."""
        self._notice = asyncio.Event()

    async def until_asked(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`. If SIGTERM arrives first, cancel it and raise Stopped."""
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
            print("ended immediately by a second signal", file=sys.stderr, flush=True)
            os._exit(128 + signum)
        self.signum = signum
        if self._task is None or self._loop is None:  # `run` sets both
            raise Interrupted(signum)
        if signum == signal.SIGTERM and self._notice is not None:
            self._loop.call_soon_threadsafe(self._notice.set)
        else:
            self._loop.call_soon_threadsafe(self._task.cancel)


def _pass() -> None:
    """Do nothing: `Interruption._handle` has already handled the signal."""
