"""The resource limits of one job. They apply from its first instruction and to everything that it starts."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RUN_S = 3600.0
"""The longest time-out; a request for a longer one gets this."""


@dataclass(frozen=True)
class Limits:
    """CPU time and file size are limits per process, memory and the number of processes of the whole job."""

    cpu_s: float | None = None
    """CPU seconds; None: the time-out plus one second."""
    memory_mb: int = 1024
    """In MiB, also the limit on the address space of each process; 0: no limit."""
    processes: int = 64
    file_mb: int = 64
    """Size of the largest file that a job may write, in MiB."""
    output_bytes: int = 1 << 20
    """Bytes kept of stdout and of stderr, each; the rest is read and dropped."""
    open_files: int = 256
