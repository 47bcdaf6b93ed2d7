"""A pool of jails of one kind, forked ahead of need.

Invariant: a jail is handed out once and never returned. A zygote that dies, or breaks the protocol, is replaced; so is
one that has forked enough jails, since all of its children share its memory layout and its hash seed. It ends with its
last jail.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from recipe.sandbox.jail import protocol
from recipe.sandbox.jail.cgroup import Group, Groups
from recipe.sandbox.jail.handle import Jail
from recipe.sandbox.jail.helper import Helper, NotStarted
from recipe.sandbox.outcome import SandboxError

logger = logging.getLogger(__name__)

_TRIES = 3
_ASK_AGAIN_S = 0.01


class JailPool:
    """Keeps `ahead` jails waiting.

    life: jails that one zygote forks. on_modules: called with the names of the modules that a new zygote has loaded.
    groups: gives each jail a control group; None where the machine grants none.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        ahead: int,
        on_modules: Callable[[list[str]], None],
        *,
        life: int,
        groups: Groups | None,
    ):
        self._settings = settings
        self._ahead = ahead
        self._life = life
        self._dies_whole = settings["wall"] == "full"
        self._on_modules = on_modules
        self._groups = groups
        self._zygote: Helper | None = None
        self._forked = 0
        """Jails forked by the current zygote."""
        self._waiting: deque[Jail] = deque()
        self._requests: deque[asyncio.Future[Jail]] = deque()
        self._coming: deque[Group | None] = deque()
        """The groups of the jails that the current zygote was asked for."""
        self._next: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the first zygote, or the next one. Raises NotStarted."""
        zygote = Helper("zygote", self._settings, self._on_ready, self._on_exit)
        await zygote.start()
        previous, self._zygote = self._zygote, zygote
        self._forget_coming()
        self._forked = 0
        self._on_modules(zygote.hello["modules"])
        if previous is not None:
            self._discard()
            previous.retire()
        self._ask()

    async def take(self) -> Jail:
        """Return a fresh jail. Raises SandboxError if none can be made."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        if self._zygote is None and self._next is None:
            self._replace()
        while self._waiting:
            jail = self._waiting.popleft()
            if jail.is_alive():
                asyncio.get_running_loop().call_soon(self._ask)
                return jail
            jail.close()
        request: asyncio.Future[Jail] = asyncio.get_running_loop().create_future()
        self._requests.append(request)
        asyncio.get_running_loop().call_soon(self._ask)
        try:
            return await request
        except asyncio.CancelledError:
            if request in self._requests:
                self._requests.remove(request)
            elif request.done() and not request.cancelled() and request.exception() is None:
                request.result().close()
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
        self._forget_coming()
        self._refuse("the sandbox is closed")

    def status(self) -> dict[str, object]:
        """Return the number of `waiting` jails and the target `ahead`, which is 0 without a zygote."""
        ahead = 0 if self._zygote is None else self._ahead
        return {"waiting": len(self._waiting), "ahead": ahead, "forked": self._forked}

    def number(self) -> int | None:
        """Return the zygote's process number; None without a zygote."""
        return self._zygote.number() if self._zygote is not None else None

    def _ask(self) -> None:
        missing = self._ahead + len(self._requests) - len(self._waiting) - len(self._coming)
        if self._zygote is None or missing <= 0:
            return
        try:
            sent = self._order(self._zygote, missing)
        except OSError as error:
            logger.warning("sandbox: no jail could be ordered: %s; trying again", error)
            sent = False
        if not sent:
            asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self._ask)
        if self._forked >= self._life and self._next is None:
            self._replace()

    def _order(self, zygote: Helper, missing: int) -> bool:
        """Ask for jails, and pass the entrances of their groups; return False if the zygote did not get all of them."""
        most = protocol.MOST_DESCRIPTORS // self._groups.per_jail if self._groups else missing
        while missing:
            number = min(missing, most)
            groups: list[Group | None] = []
            descriptors: list[int] = []
            sent = False
            try:
                for _ in range(number):
                    groups.append(self._groups.take() if self._groups else None)
                    descriptors += groups[-1].entrances() if groups[-1] else []
                sent = zygote.tell({"jails": number}, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
                if not sent:
                    for group in groups:
                        self._give_back(group)
            if not sent:
                return False
            self._coming += groups
            self._forked += number
            missing -= number
        return True

    def _give_back(self, group: Group | None) -> None:
        if self._groups and group:
            self._groups.give_back(group)

    def _forget_coming(self) -> None:
        while self._coming:
            self._give_back(self._coming.popleft())

    def _release(self, zygote: Helper, group: Group | None) -> None:
        zygote.release()
        self._give_back(group)

    def _on_ready(self, zygote: Helper, _message: object, descriptors: list[int]) -> None:
        connection, process = descriptors
        zygote.use()
        # The groups of an earlier zygote's jails were given back when it was replaced.
        group = self._coming.popleft() if zygote is self._zygote else None
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, connection)
        on_close = partial(self._release, zygote, group)
        jail = Jail(ours, process, zygote, on_close, dies_whole=self._dies_whole, group=group)
        if zygote is not self._zygote:
            jail.close()
            return
        while self._requests:
            request = self._requests.popleft()
            if not request.done():
                request.set_result(jail)
                return
        if len(self._waiting) < self._ahead:
            self._waiting.append(jail)
        else:
            jail.close()  # the call that requested it was cancelled

    def _on_exit(self, zygote: Helper) -> None:
        if zygote is self._zygote and not self._closed:
            logger.warning("sandbox: a zygote died; starting another")
            self._zygote = None
            self._discard()
            self._forget_coming()
            if self._next is None:
                self._replace()

    def _replace(self) -> None:
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
            self._refuse("no jail can be made; see the server's log")

    def _discard(self) -> None:
        while self._waiting:
            self._waiting.popleft().close()

    def _refuse(self, reason: str) -> None:
        while self._requests:
            request = self._requests.popleft()
            if not request.done():
                request.set_exception(SandboxError(reason))
