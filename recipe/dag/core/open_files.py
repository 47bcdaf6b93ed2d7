"""The limit of open files of this process: episodes hold connections, and programs hold pipes.

Invariant: the limit is only ever raised, up to the hard limit of an unprivileged process.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

_PER_EPISODE = 2
"""Such as one connection each for its env and its reward."""
_BASE = 512
"""Files of Ray, data, logs and the sandbox's connections."""


def raise_limit() -> int:
    """Raise the limit of this process, and of processes that it starts, to the hard limit; return the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # the kernel rejects an infinite limit
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def shortage(in_flight: int, limit: int) -> str | None:
    """Return a warning if `limit` open files may be too few for `in_flight` episodes; None if they are enough."""
    needed = _BASE + _PER_EPISODE * in_flight
    if limit >= needed:
        return None
    fitting = max(1, (limit - _BASE) // _PER_EPISODE)
    return (
        f"this process may open {limit} files, and rollout.max_in_flight={in_flight} episodes may need {needed}: "
        f"raise the hard limit (ulimit -Hn {needed}, or nofile in /etc/security/limits.conf), or set "
        f"rollout.max_in_flight={fitting}"
    )
