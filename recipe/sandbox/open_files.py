"""The limit of open files of this process: programs hold pipes, and clients hold connections.

Invariant: the limit is only ever raised, up to the hard limit of an unprivileged process.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress


def raise_limit() -> int:
    """Raise the limit of this process, and of processes that it starts, to the hard limit; return the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # the kernel rejects an infinite limit
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize
