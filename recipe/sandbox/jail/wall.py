"""The barrier between a job and the machine.

Invariant: the zygote and the supervisor are the same behind every wall; a wall decides how a jail is forked, what its
job may reach, and how its processes end.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from recipe.sandbox.jail.namespaces import Namespaces
from recipe.sandbox.jail.subtree import Subtree


class Wall(Protocol):
    """Made in the zygote, copied into each jail by the fork. job: the message that describes it."""

    sweeps: bool
    """Whether the zygote must call `sweep` from time to time."""

    def prepare(self, control: socket.socket) -> Iterator[str]:
        """Separate the zygote from the server, before it loads libraries. Yields the name of each step before it.
        Raises OSError."""
        ...

    def fork(self) -> tuple[int, int]:
        """Fork a jail; return (0, -1) in its first process, else (pid, pidfd)."""
        ...

    def start(self) -> None:
        """Set up the first process of a jail. Raises OSError."""
        ...

    def enter(self) -> None:
        """Set up the jail in its second process, before there is a job. Raises OSError."""
        ...

    def grant(self, job: Mapping[str, Any], mounts: Sequence[int]) -> None:
        """Make the job's own directories available in the job's process. mounts: of its sessions, which it closes."""
        ...

    def confine(self, job: Mapping[str, Any]) -> None:
        """Give up all rights of this process permanently."""
        ...

    def environment(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables that differ from job to job."""
        ...

    def shield(self) -> None:
        """Protect the first process from the job."""
        ...

    def end_all(self) -> None:
        """Kill and collect all other processes of the jail, from its first process, whose children they then are."""
        ...

    def read_back(self, job: Mapping[str, Any], work: Callable[[], None]) -> None:
        """Run `work` with the job's rights in the first process of its jail, after the job's end."""
        ...

    def sweep(self) -> None:
        """Kill, in the zygote, processes whose jail's first process was killed."""
        ...


def make(settings: Mapping[str, Any]) -> Wall:
    """Return the wall that the settings name: full, landlock or rlimits."""
    if settings["wall"] == "full":
        return Namespaces(settings)
    return Subtree(settings, landlocked=settings["wall"] == "landlock")
