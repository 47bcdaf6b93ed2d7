"""The memory of all of a job's processes together.

Invariant: what is measured is what the job costs this machine: memory that processes share, with each other or with
the zygote that they were forked from, is not counted more than once. The cheap measure is an upper bound; only
when it is too high is the exact one taken.
"""

from __future__ import annotations

import os
from contextlib import suppress

from recipe.dag.sandbox import survivors

_PAGE = os.sysconf("SC_PAGE_SIZE")


_SLACK = 64 << 20
"""A single process runs into its own limit first, which its program can handle."""


def exceeds(process: int, limit: int) -> bool:
    """Whether `process` and its descendants hold more than `limit` bytes, and some slack."""
    limit += _SLACK
    members = survivors.descendants(process)
    if sum(map(_resident, members)) <= limit:
        return False
    return sum(map(_proportional, members)) > limit


def _resident(process: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(process: int) -> int:
    """Resident bytes, each page divided by those who share it; all resident bytes where the kernel does not say."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) << 10
    except ProcessLookupError:
        return 0
    except OSError:
        pass
    return _resident(process)
