"""Which engine runs the jobs.

Invariant: an engine below full isolation is used only by someone who asked for it and accepted that it is no security
boundary. Nothing steps down by itself: an engine that cannot start says why, and a job that cannot be set up is a
SandboxError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from recipe.dag.sandbox.execute import Executor
from recipe.dag.sandbox.jail.bwrap import BwrapEngine
from recipe.dag.sandbox.jail.warm import WarmEngine
from recipe.dag.sandbox.limits import Limits
from recipe.dag.sandbox.outcome import Execution, Unavailable

ISOLATIONS = ("full", "rlimits")
ENGINES = ("auto", "warm", "bwrap", "rlimits")


class Engine(Protocol):
    """`isolation`: "full" or "rlimits". `name`: "warm", "bwrap" or "rlimits"."""

    isolation: str
    name: str
    owner: int | None
    """The user whom files put into a work directory must belong to, to be writable by jobs; None: this process's."""

    async def start(self) -> None:
        """Probe, and get ready. Raises Unavailable, which names what is missing and how to mend it."""

    async def execute(
        self,
        code: str,
        language: str = "python",
        timeout_s: float = 10.0,
        stdin: str | None = None,
        files: Mapping[str, str | None] | None = None,
        limits: Limits = Limits(),
        *,
        compile_timeout_s: float = 10.0,
        fetch: Iterable[str] = (),
        work: Path | None = None,
        shares: Mapping[str, Path] | None = None,
    ) -> Execution:
        """Run one program; nothing of it lives on when this returns. Raises SandboxError when it cannot be set up.

        work: directory under the engine's root, read-write at /session, the job's working directory; fresh when None.
        shares: directories under the engine's root, read-only at /in/NAME.
        """

    async def close(self) -> None:
        """End what is running; nothing is left behind."""

    def status(self) -> dict[str, object]:
        """For GET /v1/status."""


def choose(isolation: str, accept_unsandboxed: bool, engine: str = "auto", *, root: Path) -> Engine:
    """The engine to start. Raises Unavailable for what must not or cannot be.

    root: an existing directory, the caller's, under which all `work` and `shares` will lie.
    """
    if isolation not in ISOLATIONS:
        raise Unavailable(f"isolation {isolation!r} is not one of {', '.join(ISOLATIONS)}")
    if engine not in ENGINES:
        raise Unavailable(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    if isolation == "rlimits":
        if not accept_unsandboxed:
            raise Unavailable(
                "isolation 'rlimits' is no security boundary: programs run as this user, with its files and network;"
                " accept that with --i-accept-unsandboxed (sandbox.accept_unsandboxed: true)"
            )
        if engine not in ("auto", "rlimits"):
            raise Unavailable(f"engine {engine!r} isolates fully; take --isolation=full, or --engine=auto")
        return Executor(root, exclusive=True)
    if engine == "rlimits":
        raise Unavailable("engine 'rlimits' isolates nothing; it needs --isolation=rlimits --i-accept-unsandboxed")
    return BwrapEngine(root) if engine == "bwrap" else WarmEngine(root)
