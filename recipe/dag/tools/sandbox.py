"""The engine's door to `recipe.sandbox`, the server that runs programs.

Invariant: no other module of the engine imports that package, and it raises the engine's errors here: a server that
cannot start is a UserError, which names the keys of a run that help; one that cannot start again is a SandboxFault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.sandbox.errors import CannotIsolate, CannotStart
from recipe.sandbox.fair_queue import default_slots
from recipe.sandbox.file_pattern import matches
from recipe.sandbox.launch import LocalSandbox
from recipe.sandbox.limits import MAX_RUN_S
from recipe.sandbox.open_files import raise_limit
from recipe.sandbox.web_pages import is_for_loopback, is_from_page, is_loopback

if TYPE_CHECKING:  # an HTTP client, which `validate` does not need
    from recipe.dag.tools.sandbox_client import SandboxClient
    from recipe.sandbox.selftest import Report

__all__ = [
    "MAX_RUN_S",
    "Sandbox",
    "is_for_loopback",
    "is_from_page",
    "is_loopback",
    "matches",
    "raise_limit",
    "self_test",
    "serve",
]
REMOTE_PROGRAMS = 64
"""Programs at once on a server of the user, if the configuration sets no other number."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The server that runs the programs of a run's episodes, and this process's client of it."""

    arguments: Mapping[str, Any]
    """SandboxClient's, for the clients of other processes."""
    client: SandboxClient
    local: LocalSandbox | None = None
    """The server, if this process has started it."""
    ensure: Callable[[], Awaitable[None]] | None = None
    """Restarts that server if it does not answer. Raises SandboxFault."""
    launched: asyncio.Future[None] | None = None
    """Done when that server has started."""
    requested: Mapping[str, Any] = field(default_factory=dict)
    """How it was to isolate programs."""

    @classmethod
    async def connect(cls, url: str, *, token: str | None, max_concurrent: int | None, margin_s: float) -> Sandbox:
        """Use a server of the user. Raises UserError unless it answers."""
        from recipe.dag.tools.sandbox_client import SandboxClient, check_sandbox

        await check_sandbox(url, token=token)
        limits = {"max_concurrent": max_concurrent or REMOTE_PROGRAMS, "margin_s": margin_s}
        arguments = {"url": url, "token": token, **limits}
        return cls(arguments, SandboxClient(**arguments))

    @classmethod
    async def start(cls, max_concurrent: int | None = None, **requested: Any) -> Sandbox:
        """Start a server that ends with this process. Arguments: LocalSandbox's. Raises UserError."""
        sandbox = cls.begin(max_concurrent, **requested)
        await sandbox.ready()
        return sandbox

    @classmethod
    def begin(cls, max_concurrent: int | None = None, **requested: Any) -> Sandbox:
        """Start such a server in a thread, whether or not the event loop runs on; `ready` waits for it, and `close`,
        too. Raises UserError."""
        from recipe.dag.tools.sandbox_client import SandboxClient

        most = default_slots()
        local = LocalSandbox(min(max_concurrent or most, most), **requested)

        async def ensure() -> None:
            try:
                await local.ensure()
            except CannotStart as error:
                # It ran before, so the cause is not in what the user wrote.
                raise SandboxFault(str(error), where="sandbox") from error

        with _reported(**requested):
            local.reserve()
        launched = asyncio.get_running_loop().run_in_executor(None, local.launch)
        arguments = {"url": local.url, "token": local.token, "max_concurrent": local.max_concurrent}
        client = SandboxClient(**arguments, on_unreachable=ensure)
        return cls(arguments, client, local, ensure, launched, requested)

    async def ready(self) -> None:
        """Wait until the server has started. Raises UserError."""
        if self.launched is not None:
            with _reported(**self.requested):
                await asyncio.shield(self.launched)

    async def close(self) -> None:
        await self.client.close()
        if self.launched is not None:
            await asyncio.wait([self.launched])
            self.launched.exception()  # or asyncio would log one that nobody waited for
        if self.local is not None:
            await self.local.stop()


def self_test() -> Report:
    """Start a server, run two programs and three attacks in it, and return what happened. Raises UserError if it does
    not start."""
    from recipe.sandbox import selftest

    with _reported():
        return asyncio.run(selftest.run())


def serve(arguments: Sequence[str], name: str) -> None:
    """Run `python -m recipe.sandbox` with these arguments, as the command `name`. Raises UserError."""
    from recipe.sandbox import command

    try:
        command.serve(arguments, name)
    except CannotStart as error:
        raise UserError(str(error)) from None


@contextmanager
def _reported(isolation: str = "auto", accept_unsandboxed: bool = False) -> Iterator[None]:
    """Raise a UserError for a server that cannot start, with the keys of a run that let it start, if any do."""
    way_out = "" if accept_unsandboxed else "; accept that with sandbox.accept_unsandboxed=true"
    if isolation != "rlimits":
        way_out = (
            "; to run without a security boundary (the agents' code runs as this user, with resource limits only), set "
            "sandbox.isolation=rlimits sandbox.accept_unsandboxed=true"
        )
    try:
        yield
    except CannotIsolate as error:
        raise UserError(f"{error}{way_out}") from None
    except CannotStart as error:
        raise UserError(str(error)) from None
