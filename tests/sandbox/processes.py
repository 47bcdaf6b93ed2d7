"""Processes of servers and of their jobs, as the machine shows them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def alive(pids: Iterable[int]) -> set[int]:
    """Return those that are alive; zombies, which may have no parent to collect them, are not."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


def sleepers(seconds: str) -> list[str]:
    """Return the processes that sleep for this number of seconds."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if f"sleep\0{seconds}" in Path(f"/proc/{name}/cmdline").read_text():
                found.append(name)
    return found


def until(condition: Callable[[], object], patience_s: float = 60.0) -> bool:
    """Wait until the condition holds; return whether it does."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
