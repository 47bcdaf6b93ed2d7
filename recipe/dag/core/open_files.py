"""How many files a run opens: episodes hold connections."""

from __future__ import annotations

_PER_EPISODE = 2
"""Such as one connection each for its env and its reward."""
_BASE = 512
"""Files of Ray, data, logs and the sandbox's connections."""


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
