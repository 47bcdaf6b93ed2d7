"""The phases of a run's start, shown with their times from the first second.

Invariant: phases go to stderr. On a terminal each is a running clock, and one line with its seconds when it ends.
Elsewhere each is one line when it begins, with the time since the process started (`0:04 starting Ray ...`), and a
further line at every interval while it lasts. Until `ready`, both name the CUDA kernels that are compiled.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from recipe.dag.report.display import DISPLAY, Activity, Display

FIRST = "imports and configuration"
"""The phase before the first announced one."""
SCAN_S = 5.0
"""Shortest time between two looks at all processes, in seconds; a terminal asks for the state ten times a second."""


def kernels_in_work() -> list[str]:
    """Return the names of the CUDA kernels that processes of this user compile on this machine.

    SGLang's processes build kernels with nvcc when they first use them, FlashInfer's from files named after the kernel,
    its own from `sgl_kernel_jit_<kernel>_<parameters>_<hash>/cuda.cu`.
    """
    sources: set[Path] = set()
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "nvcc":
            with suppress(psutil.Error):  # it has ended, or hides its arguments
                if process.uids().real == os.getuid():
                    sources.update(Path(argument) for argument in process.cmdline() if argument.endswith(".cu"))
    return sorted({_kernel(source) for source in sources})


def _kernel(source: Path) -> str:
    if source.stem != "cuda":
        return source.stem
    return re.sub(r"^sgl_kernel_jit_|_(true|false|[a-z]*\d+(_t)?)_.*|_[0-9a-f]{16}$", "", source.parent.name)


class StartPhase(Activity):
    """A phase of the start under way; its state names the kernels that are compiled."""

    _scanned, _state = -math.inf, ""

    def state(self, now: float) -> str:
        if now - self._scanned >= SCAN_S:
            self._scanned, kernels = now, kernels_in_work()
            more = f" and {len(kernels) - 3} more" if len(kernels) > 3 else ""
            self._state = f"compiling {', '.join(kernels[:3])}{more}" if kernels else ""
        return self._state


class Phases:
    """A sequence of phases; each ends when the next one begins, or with `end`."""

    def __init__(self, display: Display | None = None, *, started: float | None = None):
        """`started`: time.time() at the start of the process, by default from the system."""
        self._display = display or DISPLAY
        self._started = psutil.Process().create_time() if started is None else started
        self._activity: Activity | None = None
        self._kind: type[Activity] = StartPhase
        self._begun = 0.0
        self.seconds: dict[str, float] = {}
        """Duration of each finished phase, in seconds."""

    def begin(self, name: str) -> None:
        """End the current phase and begin another."""
        self.end()
        now = time.time()
        if not self.seconds:
            self.seconds[FIRST] = now - self._started
        self._begun = now
        if not self._display.is_terminal:
            self._display.print(f"{_clock(now - self._started)} {name} ...")
        self._activity = self._kind(name, display=self._display)
        self._activity.__enter__()

    def end(self) -> None:
        """End the current phase, if there is one."""
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
        """Print all phases with their seconds, and return the seconds since the process started."""
        self.end()
        self._kind = Activity
        whole = time.time() - self._started
        parts = ", ".join(f"{name} {_short(seconds)}" for name, seconds in self.seconds.items())
        self._display.print(f"{_clock(whole)} ready after {_short(whole)} s: {parts}")
        return whole


PHASES = Phases()
"""The phases of this process's run."""


def announce(phase: str) -> None:
    """Begin a phase of the run's start, such as `starting Ray`; it lasts until the next one, or until `end_phase`."""
    PHASES.begin(phase)


def end_phase() -> None:
    """End the current phase, if there is one."""
    PHASES.end()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Show `name` as the current phase while the body runs."""
    announce(name)
    try:
        yield
    finally:
        end_phase()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
