"""The server's side of a zygote: jails, forked ahead of need.

Invariant: a jail is handed out once and never comes back. A zygote that dies, or breaks the protocol, is replaced; so
is one that has forked enough jails, since all of its children share its layout in memory and its hash seed. It is let
go when its last jail is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe.dag.sandbox.jail import protocol
from recipe.dag.sandbox.jail.handle import Jail
from recipe.dag.sandbox.jail.zygote import STARTER
from recipe.dag.sandbox.outcome import SandboxError

logger = logging.getLogger(__name__)

_IMPORT_FROM = str(Path(__file__).resolve().parents[4])
_START_S = 120.0
_LIFE = 5000
"""Jails of one zygote."""
_TRIES = 3


class NotStarted(Exception):
    """A zygote that could not be set up. `step` and `number` (an errno, or None) say where and how."""

    def __init__(self, step: str, why: str, number: int | None = None):
        super().__init__(f"{step}: {why}")
        self.step, self.number = step, number


class Zygote:
    """One zygote process. Events are handed to `on_jail` and `on_death`."""

    def __init__(
        self, settings: Mapping[str, Any], on_jail: Callable[[Zygote, Jail], None], on_death: Callable[[Zygote], None]
    ):
        self._settings = settings
        self._on_jail, self._on_death = on_jail, on_death
        self._jails = 0
        self._retired = False
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.forked = 0
        self.modules: list[str] = []

    async def start(self) -> None:
        """Raises NotStarted."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Pipes, as a job's streams will be: the interpreter looks once, when it starts.
            self._process = subprocess.Popen(
                [sys.executable, "-c", STARTER],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()],
                env=dict(self._settings["environment"]), cwd="/", start_new_session=True,
            )  # fmt: skip
            self._process.stdin.write(f"{theirs.fileno()}\0{_IMPORT_FROM}".encode())
            self._process.stdin.close()
        self._control = ours
        protocol.send(ours, {**self._settings, "server": os.getpid()})
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._hear)
        try:
            await asyncio.wait_for(self._ready, _START_S)
        except TimeoutError:
            self.end()
            raise NotStarted("start", f"no answer within {_START_S:g} s") from None
        except BaseException:
            self.end()
            raise

    def ask(self, jails: int) -> None:
        self.forked += jails
        with suppress(OSError):
            protocol.send(self._control, {"jails": jails})

    def retire(self) -> None:
        """End when the last of its jails has ended."""
        self._retired = True
        if self._jails == 0:
            self.end()

    def _release(self) -> None:
        self._jails -= 1
        if self._retired and self._jails == 0:
            self.end()

    def end(self) -> None:
        """Kill it, and with it all of its jails."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process.stderr.close()
            self._process = None

    def number(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _hear(self) -> None:
        try:
            while True:
                message, descriptors = protocol.receive(self._control)
                if "jail" in message:
                    self._jails += 1
                    connection, process = descriptors
                    self._on_jail(self, Jail(socket.socket(fileno=connection), process, self._release))
                elif "ready" in message:
                    self.modules = message["modules"]
                    self._ready.set_result(None)
                elif not self._ready.done():
                    self._ready.set_exception(NotStarted(message["failed"], message["why"], message["errno"]))
        except BlockingIOError:
            return
        except protocol.Closed:
            if not self._ready.done():
                self._ready.set_exception(NotStarted("start", self._last_words()))
                return
            self.end()
            self._on_death(self)
        except Exception:
            logger.exception("sandbox: a zygote broke the protocol")
            self.end()
            self._on_death(self)

    def _last_words(self) -> str:
        self._process.kill()
        words = self._process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        return words[-1] if words else "it ended"


class Nursery:
    """The zygotes of one kind, one at a time, and `ahead` jails that wait.

    on_modules: told the names of the modules that a new zygote has loaded.
    """

    def __init__(self, settings: Mapping[str, Any], ahead: int, on_modules: Callable[[list[str]], None]):
        self._settings = settings
        self._ahead = ahead
        self._on_modules = on_modules
        self._zygote: Zygote | None = None
        self._waiting: deque[Jail] = deque()
        self._wanted: deque[asyncio.Future[Jail]] = deque()
        self._coming = 0
        self._next: asyncio.Task[None] | None = None
        self._closed = False
        self.replaced = 0

    async def start(self) -> None:
        """Raises NotStarted."""
        zygote = Zygote(self._settings, self._welcome, self._mourn)
        await zygote.start()
        before, self._zygote = self._zygote, zygote
        self._coming = 0
        self._on_modules(zygote.modules)
        if before is not None:
            self._discard()
            before.retire()
        self._ask()

    async def take(self) -> Jail:
        """A fresh jail. Raises SandboxError when there can be none."""
        if self._zygote is None and self._next is None:
            self._replace()
        if self._waiting:
            jail = self._waiting.popleft()
            self._ask()
            return jail
        wish: asyncio.Future[Jail] = asyncio.get_running_loop().create_future()
        self._wanted.append(wish)
        self._ask()
        try:
            return await wish
        except asyncio.CancelledError:
            if wish in self._wanted:
                self._wanted.remove(wish)
            elif wish.done() and not wish.cancelled() and wish.exception() is None:
                wish.result().close()
            raise

    async def close(self) -> None:
        self._closed = True
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        self._discard()
        if self._zygote is not None:
            self._zygote.end()
            self._zygote = None
        self._refuse("the sandbox is closed")

    def status(self) -> dict[str, object]:
        return {"waiting": len(self._waiting), "forked": self._zygote.forked if self._zygote else 0}

    def number(self) -> int | None:
        return self._zygote.number() if self._zygote else None

    def _ask(self) -> None:
        missing = self._ahead + len(self._wanted) - len(self._waiting) - self._coming
        if self._zygote is None or missing <= 0:
            return
        self._coming += missing
        self._zygote.ask(missing)
        if self._zygote.forked >= _LIFE and self._next is None:
            self._replace()

    def _welcome(self, zygote: Zygote, jail: Jail) -> None:
        if zygote is not self._zygote:
            jail.close()
            return
        self._coming -= 1
        while self._wanted:
            wish = self._wanted.popleft()
            if not wish.done():
                wish.set_result(jail)
                return
        self._waiting.append(jail)

    def _mourn(self, zygote: Zygote) -> None:
        if zygote is self._zygote and not self._closed:
            logger.warning("sandbox: a zygote died; starting another")
            self._zygote = None
            self._discard()
            if self._next is None:
                self._replace()

    def _replace(self) -> None:
        self.replaced += 1
        self._next = asyncio.get_running_loop().create_task(self._start_another())
        self._next.add_done_callback(self._forget)

    def _forget(self, _task: object) -> None:
        self._next = None

    async def _start_another(self) -> None:
        for attempt in range(_TRIES):
            try:
                return await self.start()
            except (NotStarted, OSError) as error:
                logger.warning("sandbox: no new zygote: %s", error)
                await asyncio.sleep(0.1 * 2**attempt)
        if self._zygote is None:
            self._refuse("no jail can be made any more; see the server's log")

    def _discard(self) -> None:
        while self._waiting:
            self._waiting.popleft().close()

    def _refuse(self, reason: str) -> None:
        while self._wanted:
            wish = self._wanted.popleft()
            if not wish.done():
                wish.set_exception(SandboxError(reason))
