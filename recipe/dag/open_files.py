"""How many files this process may have open: episodes hold connections, and programs pipes.

Invariant: the limit is only ever raised, as far as the system lets a process without rights.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

_PER_EPISODE = 2
"""A connection of its env and one of its reward, say."""
_REST = 512
"""Ray, data, logs, the sandbox's connections."""


def raise_limit() -> int:
    """Allow this process, and those that it starts, as many open files as the system lets it; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # An infinite one is more than the kernel grants.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def shortage(in_flight: int, limit: int) -> str | None:
    """One line where `limit` open files may be too few for that many episodes at once; None where they are enough."""
    needed = _REST + _PER_EPISODE * in_flight
    if limit >= needed:
        return None
    fitting = max(1, (limit - _REST) // _PER_EPISODE)
    return (
        f"this process may open {limit} files, and rollout.max_in_flight={in_flight} episodes may need {needed}: "
        f"raise the hard limit (ulimit -Hn {needed}, or nofile in /etc/security/limits.conf), or set "
        f"rollout.max_in_flight={fitting}"
    )
