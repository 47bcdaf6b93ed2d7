"""A circuit breaker: it holds requests to a server that fails back.

Invariant: no clock is read here but the one that is passed in, and nothing is sent. While the circuit is open, at most
one request at a time probes the server, and only that request's end changes the circuit: requests that entered before
it opened or closed say nothing about the server as it is now.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from recipe.dag.core.pace import Clock


@dataclass(frozen=True, slots=True)
class Entry:
    """The permission to send one request, which must end in `succeeded`, `failed` or `gave_up`."""

    era: int
    """How often the circuit had changed when the request entered."""
    probe: bool
    """The circuit was open, and this request alone tests the server."""


@dataclass(slots=True)
class CircuitBreaker:
    """Opens after `threshold` failures in a row; then nothing is sent for `pause_s`, and then one probe. A probe that
    succeeds closes it, and one that fails opens it again. Safe for several threads."""

    threshold: int
    pause_s: float
    clock: Clock
    failures: int = 0
    """In a row."""
    opened: int = 0
    """How often it has opened."""
    _era: int = 0
    _until: float | None = field(default=None)
    """When the next probe may be sent; None while the circuit is closed."""
    _probing: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_open(self) -> bool:
        return self._until is not None

    def wait_s(self) -> float:
        """Return 0 if `enter` may let a request through now, else the seconds after which to ask again."""
        with self._lock:
            return self._wait_s()

    def enter(self) -> Entry | None:
        """Return the permission to send a request now, or None. The request that an open circuit lets through is its
        probe."""
        with self._lock:
            if self._wait_s() > 0:
                return None
            self._probing = self._until is not None
            return Entry(self._era, self._probing)

    def admits(self, entry: Entry) -> bool:
        """Return whether the circuit is as it was when the request entered, so that it may still be sent."""
        return entry.era == self._era

    def succeeded(self, entry: Entry) -> None:
        with self._lock:
            if not self.admits(entry):
                return
            if entry.probe:
                self._change(None)
            self.failures = 0

    def failed(self, entry: Entry) -> bool:
        """Return whether this failure opened the circuit, or opened it again."""
        with self._lock:
            if not self.admits(entry):
                return False
            self.failures += 1
            opens = entry.probe or self.failures >= self.threshold
            if opens:
                self.opened += 1
                self._change(self.clock() + self.pause_s)
            return opens

    def gave_up(self, entry: Entry) -> None:
        """Note that a request ended without saying anything about the server, such as one that was cancelled."""
        with self._lock:
            if entry.probe and self.admits(entry):
                self._probing = False

    def _wait_s(self) -> float:
        if self._until is None:
            return 0.0
        rest = self._until - self.clock()
        return max(rest, self.pause_s / 10) if rest > 0 or self._probing else 0.0

    def _change(self, until: float | None) -> None:
        self._era, self._until, self._probing = self._era + 1, until, False
