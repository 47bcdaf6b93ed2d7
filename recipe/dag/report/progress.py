"""Progress of the step's episodes and of its training passes.

Invariant: episodes are counted as they end. A training pass is one call to the workers, which reports nothing until it
returns: its progress is estimated from the speed of the last pass of its kind and labelled as an estimate. A first pass
shows none, nor does a pass beyond its estimated end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recipe.dag.core.counted import counted
from recipe.dag.report.console import short_count
from recipe.dag.report.display import Activity, Display
from recipe.dag.types.record import Episode

SHORT_S = 1.0
"""Seconds below which a training pass does not count as a measurement of speed."""


class Progress(Activity):
    """`with Progress(total, "step 3") as progress: ... progress.update(episode)` as each episode ends.

    `running` returns the number of running episodes; without it, all unfinished ones count as running.
    """

    def __init__(
        self,
        total: int,
        label: str = "episodes",
        *,
        enabled: bool = True,
        running: Callable[[], int] | None = None,
        display: Display | None = None,
    ):
        super().__init__(label, enabled=enabled, display=display)
        self.total, self.done, self.faults = total, 0, 0
        self._running = running or (lambda: self.total - self.done)
        self._last = self.started
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        super().__enter__()
        self._last = self.started
        return self

    def update(self, episode: Episode) -> None:
        """Count a finished episode, with or without a fault."""
        with self._lock:
            self.done += 1
            self.total += episode.forked is not None  # an episode's forks are known when it has ended
            self.faults += episode.fault is not None
            self._last = time.monotonic()

    def fraction(self, now: float) -> float | None:
        return self.done / max(self.total, 1)

    def line(self, now: float | None = None) -> str:
        now = time.monotonic() if now is None else now
        with self._lock:
            return f"{self.label}: {self.done}/{self.total} in {now - self.started:.0f} s, {self._summary(now)}"

    def state(self, now: float) -> str:
        with self._lock:
            return f"{self.done}/{self.total}, {self._summary(now)}"

    def _summary(self, now: float) -> str:
        speed = self.done / max(now - self.started, 1e-9)
        text = f"{speed:.2f} episodes/s, {self._running()} running, {counted(self.faults, 'fault')}"
        # within one interval, silence is normal
        quiet = now - self._last
        return text + (f", nothing finished for {quiet:.0f} s" if quiet > self._display.interval_s else "")


class TrainingPass(Activity):
    """A worker call over `tokens` tokens, or other work if None. `speed`: tokens per second of the last pass of its
    kind, None for the first."""

    def __init__(
        self,
        label: str,
        tokens: int | None,
        speed: float | None,
        *,
        enabled: bool = True,
        display: Display | None = None,
    ):
        super().__init__(label, enabled=enabled, display=display)
        self.tokens, self.speed = tokens, speed

    def fraction(self, now: float) -> float | None:
        if not self.tokens or not self.speed:
            return None
        share = (now - self.started) * self.speed / self.tokens
        return share if share < 1 else None

    def state(self, now: float) -> str:
        if self.tokens is None:
            return ""
        tokens = f"{short_count(self.tokens)} tokens"
        if not self.speed:
            return f"{tokens}, first pass: kernels may compile, speed not known yet"
        share = self.fraction(now)
        speed = f"at the last pass's {short_count(self.speed)} tokens/s"
        return f"about {share:.0%} of {tokens}, {speed}" if share is not None else f"{tokens}, longer than {speed}"


class TrainingPasses:
    """Shows a run's training passes and remembers their speed by kind."""

    def __init__(self, *, enabled: bool = True, display: Display | None = None):
        self._enabled, self._display = enabled, display
        self._speeds: dict[str, float] = {}

    @contextmanager
    def show(self, label: str, tokens: int | None, *, kind: str) -> Iterator[None]:
        """Show the body as a pass over `tokens` tokens. Its speed becomes the estimate for the next pass of the same
        `kind`, unless it fails or ends within SHORT_S, as a pass without work does."""
        started = time.monotonic()
        with TrainingPass(label, tokens, self._speeds.get(kind), enabled=self._enabled, display=self._display):
            yield
        seconds = time.monotonic() - started
        if tokens and seconds >= SHORT_S:
            self._speeds[kind] = tokens / seconds
