"""What holds requests back: a circuit breaker for a server that fails, and a pace for one that limits its rate.

Invariant: no clock is read here but the one that is passed in, and nothing is sent. While the circuit is open, exactly
one request at a time probes the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]
"""Returns seconds."""


@dataclass(slots=True)
class CircuitBreaker:
    """Opens after `threshold` failures in a row; then nothing is sent for `pause_s`, and then one probe. A probe that
    succeeds closes it, and one that fails opens it again."""

    threshold: int
    pause_s: float
    clock: Clock
    failures: int = 0
    """In a row."""
    opened: int = 0
    """How often it has opened."""
    _until: float | None = field(default=None)
    """When the next probe may be sent; None while the circuit is closed."""
    _probing: bool = False

    @property
    def is_open(self) -> bool:
        return self._until is not None

    def enter(self) -> float:
        """Return 0 if a request may be sent now, else the seconds after which to ask again. The request that an open
        circuit lets through is its probe, and must end in one of the other methods."""
        if self._until is None:
            return 0.0
        rest = self._until - self.clock()
        if rest > 0 or self._probing:
            return max(rest, self.pause_s / 10)
        self._probing = True
        return 0.0

    def succeeded(self) -> None:
        self.failures, self._until, self._probing = 0, None, False

    def failed(self) -> None:
        self.failures += 1
        if self._until is None and self.failures < self.threshold:
            return
        # requests that were under way when it opened do not postpone the probe
        if self._until is None or self._probing:
            self.opened += 1
            self._until = self.clock() + self.pause_s
        self._probing = False

    def gave_up(self) -> None:
        """Note that a request ended without saying anything about the server, such as one that was cancelled."""
        self._probing = False


@dataclass(slots=True)
class Pace:
    """Spaces requests evenly; `per_minute` None: no limit."""

    per_minute: float | None
    clock: Clock
    _next: float = float("-inf")

    def reserve(self) -> float:
        """Reserve the next slot and return the seconds until it."""
        if self.per_minute is None:
            return 0.0
        now = self.clock()
        slot = max(now, self._next)
        self._next = slot + 60.0 / self.per_minute
        return slot - now
