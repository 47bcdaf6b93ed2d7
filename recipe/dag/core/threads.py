"""Threads for user code that may block; an idle thread takes the next call.

Invariant: no call waits for another that blocks. A few threads share the calls that arrive together; calls that still
wait after PATIENCE_S get new threads, and a thread whose call never returns is abandoned. All are daemon threads, so
the process can end without waiting for them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

FEW = 4
"""Number of threads that are started immediately; more would only compete for the GIL."""
PATIENCE_S = 0.02
"""Seconds that a call waits before it gets a new thread."""
IDLE_S = 10.0
"""Seconds that a thread waits for its next call before it ends."""


class WorkerThreads:
    """Runs functions that never raise."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._threads = self._idle = 0
        self._watched = False

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` in a thread, without waiting for it."""
        if self._process != os.getpid():  # a forked child does not have its parent's threads
            self._reset()
        with self._changed:
            self._waiting.append((time.monotonic(), work))
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._threads < FEW:
                self._start()
            elif not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, daemon=True, name="episode-user-code-watch").start()

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._serve, daemon=True, name="episode-user-code").start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                try:
                    if not self._changed.wait_for(lambda: bool(self._waiting), IDLE_S):
                        self._threads -= 1
                        return
                finally:
                    self._idle -= 1
                _, work = self._waiting.popleft()
            work()
            del work  # otherwise its data would stay alive until the next call

    def _watch(self) -> None:
        """Start a thread for each call that has waited too long and that no idle thread is about to take."""
        while True:
            time.sleep(PATIENCE_S)
            with self._changed:
                due = time.monotonic() - PATIENCE_S
                late = sum(since <= due for since, _ in self._waiting)
                for _ in range(late - self._idle):
                    self._start()
                if not self._waiting:
                    self._watched = False
                    return
