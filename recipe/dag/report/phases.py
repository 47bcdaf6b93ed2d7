"""The phases of a run's start, with their names and times from the first second.

Invariant: phases go to stderr. Elsewhere than on a terminal each is one line when it begins, led by the time since the
process started (`0:04 starting Ray ...`), and after an interval a line now and then says that it lasts; on a terminal
each is a running clock, and one line with its seconds when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from recipe.dag.report.display import DISPLAY, Activity, Display

FIRST = "imports and configuration"
"""The phase before the first that is announced."""


class Phases:
    """One after another; a phase ends when the next begins, or with `end`."""

    def __init__(self, display: Display | None = None, *, started: float | None = None):
        """`started`: of the process, on time.time's clock."""
        self._display = display or DISPLAY
        self._started = psutil.Process().create_time() if started is None else started
        self._activity: Activity | None = None
        self._begun = 0.0
        self.seconds: dict[str, float] = {}
        """Of the phases that are over."""

    def begin(self, name: str) -> None:
        """End the phase under way and begin another."""
        self.end()
        now = time.time()
        if not self.seconds:
            self.seconds[FIRST] = now - self._started
        self._begun = now
        if not self._display.is_terminal:
            self._display.print(f"{_clock(now - self._started)} {name} ...")
        self._activity = Activity(name, display=self._display)
        self._activity.__enter__()

    def end(self) -> None:
        """End the phase under way, if there is one."""
        if self._activity is None:
            return
        activity, self._activity = self._activity, None
        activity.__exit__()
        now = time.time()
        seconds = now - self._begun
        self.seconds[activity.label] = self.seconds.get(activity.label, 0.0) + seconds
        if self._display.is_terminal:
            self._display.print(f"{_clock(now - self._started)} {activity.label}: {_short(seconds)} s")

    def ready(self) -> float:
        """End the start: print the phases with their seconds. Returns the seconds since the process started."""
        self.end()
        whole = time.time() - self._started
        parts = ", ".join(f"{name} {_short(seconds)}" for name, seconds in self.seconds.items())
        self._display.print(f"{_clock(whole)} ready after {_short(whole)} s: {parts}")
        return whole


PHASES = Phases()
"""Of this process's run."""


def announce(phase: str) -> None:
    """Begin a phase of the run's start, such as `starting Ray`; it lasts until the next one, or until `end_phase`."""
    PHASES.begin(phase)


def end_phase() -> None:
    PHASES.end()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Announce `name` for as long as the body takes."""
    announce(name)
    try:
        yield
    finally:
        end_phase()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
