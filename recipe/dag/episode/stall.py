"""Saying so when user code blocks the loop that all episodes share.

Invariant: it only looks. An async function that blocks (a plain `time.sleep`, a loop that never awaits) cannot be
stopped from outside; whoever watches the run is told which line it is.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

BLOCKED_S = 20.0
"""Nothing else could run for so long."""
DEEPEST = 4
"""How many of the innermost frames are shown."""


@contextmanager
def watched_loop() -> Iterator[None]:
    """Log once where the running loop's thread stands, each time that nothing else ran for BLOCKED_S."""
    loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
    ended, pause, alive = threading.Event(), BLOCKED_S / 4, time.monotonic()
    handle: asyncio.TimerHandle | None = None

    def beat() -> None:
        nonlocal alive, handle
        alive = time.monotonic()
        handle = loop.call_later(pause, beat)

    def watch() -> None:
        told = 0.0
        while not ended.wait(pause):
            if time.monotonic() - alive > BLOCKED_S and told != alive:
                told = alive
                frames = traceback.format_stack(sys._current_frames().get(thread_id))[-DEEPEST:]
                advice = "async code must not block; a plain function runs in a thread of its own"
                log.warning("all episodes wait for this, for %.0f s now (%s):\n%s", BLOCKED_S, advice, "".join(frames))

    beat()
    threading.Thread(target=watch, daemon=True, name="episode-watch").start()
    try:
        yield
    finally:
        ended.set()
        handle.cancel()
