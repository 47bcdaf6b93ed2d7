"""How far the step's episodes are.

Invariant: a slow step and a hung one look different. On a terminal a bar with a running clock is drawn and taken away
again; elsewhere a line is printed every interval whether or not anything finished, and says how long ago the last
episode did. What is done within one interval prints nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from recipe.dag.episode.record import Episode


class Progress:
    """`with Progress(total, "step 3") as progress: ... progress.update(episode)` as each episode ends. Thread-safe.

    `enabled=False` counts in silence. `running` tells how many episodes are under way; without it, all that are not
    done count as running.
    """

    def __init__(
        self,
        total: int,
        label: str = "episodes",
        *,
        enabled: bool = True,
        running: Callable[[], int] | None = None,
        stream: TextIO | None = None,
        interval_s: float = 10.0,
    ):
        self.total = total
        self.label = label
        self.done = 0
        self.faults = 0
        self._enabled = enabled
        self._running = running or (lambda: self.total - self.done)
        self._stream = stream or sys.stderr
        self._interval_s = interval_s
        self._started = self._last = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._started = self._last = time.monotonic()
        if not self._enabled:
            return self
        if self._stream.isatty():
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                _StateColumn(self),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task(self.label, total=self.total)
            self._bar.start()
        else:
            self._thread = threading.Thread(target=self._print_lines, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._bar:
            self._bar.stop()
        if self._thread:
            self._thread.join()

    def update(self, episode: Episode) -> None:
        """One episode has ended, with or without a fault."""
        with self._lock:
            self.done += 1
            self.faults += episode.fault is not None
            self._last = time.monotonic()
            if self._bar:
                self._bar.update(self._task, completed=self.done)

    def line(self, now: float | None = None) -> str:
        """The state as one line; `now` on time.monotonic's clock."""
        now = time.monotonic() if now is None else now
        return f"{self.label}: {self.done}/{self.total} in {now - self._started:.0f} s, {self.state(now)}"

    def state(self, now: float) -> str:
        speed = self.done / max(now - self._started, 1e-9)
        text = f"{speed:.2f} episodes/s, {self._running()} running, {self.faults} faults"
        # Within one interval, silence is nothing unusual.
        quiet = now - self._last
        return text + (f", nothing finished for {quiet:.0f} s" if quiet > self._interval_s else "")

    def _print_lines(self) -> None:
        while not self._ended.wait(self._interval_s):
            with self._lock:
                text = self.line()
            print(text, file=self._stream, flush=True)


class _StateColumn(ProgressColumn):
    """Drawn anew at every refresh of the bar, so that it goes on counting while nothing finishes."""

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress.state(time.monotonic()))
