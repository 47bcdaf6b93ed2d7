"""State that belongs to one event loop, such as connections, locks and tasks: another loop cannot use it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value for each event loop that asks for it."""

    def __init__(self, make: Callable[[], T]) -> None:
        """`make` is called on the loop that asks."""
        self._make = make
        self._values: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T] = weakref.WeakKeyDictionary()

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            self._values[loop] = self._make()
        return self._values[loop]

    def pop(self) -> T | None:
        """Forget this loop's value and return it; None if it has none."""
        return self._values.pop(asyncio.get_running_loop(), None)
