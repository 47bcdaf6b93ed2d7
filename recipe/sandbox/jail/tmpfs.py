"""The server's side of the store: sessions' directories that are file systems in memory.

Invariant: a job reaches a session only through a mount that the store made for that one call. If the store dies, its
sessions are lost, and the next one starts a new store.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

from recipe.sandbox.jail.helper import Helper, NotStarted
from recipe.sandbox.jail.rootfs import USER
from recipe.sandbox.outcome import SandboxError
from recipe.sandbox.places import Place, most_entries

_REMOVE_AGAIN_S = 0.05
_LOST = "the process that keeps the sessions died; they are lost"


class Tmpfs(Place):
    """A session's file system."""

    def __init__(self, keeper: _Keeper, name: str, descriptor: int):
        super().__init__(descriptor, USER if os.geteuid() == 0 else -1)
        self._keeper = keeper
        self._name = name

    @property
    def full(self) -> bool:
        status = os.fstatvfs(self._descriptor)
        return not (status.f_bfree and status.f_ffree)

    @property
    def lost(self) -> bool:
        return self._keeper.dead

    async def for_job(self, *, read_only: bool) -> int:
        self.directory()
        (mount,) = await self._keeper.ask("lend", self._name, read_only=read_only)
        return mount

    async def used(self) -> int:
        status = os.fstatvfs(self._descriptor)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def remove(self) -> None:
        super().remove()
        self._keeper.remove(self._name)


class Mounts:
    """Makes file systems in memory. Starts the store when the first one is created. settings: as for a zygote."""

    def __init__(self, settings: Mapping[str, Any]):
        self._settings = settings
        self._keeper: _Keeper | None = None
        self._starting = asyncio.Lock()

    async def create(self, quota_bytes: int) -> Tmpfs:
        """Return a new, empty file system. Raises SandboxError."""
        async with self._starting:
            keeper = self._keeper
            if keeper is None or keeper.dead:
                keeper = self._keeper = _Keeper(self._settings)
                await keeper.start()
        name = secrets.token_hex(8)
        try:
            (descriptor,) = await keeper.ask("create", name, bytes=quota_bytes, entries=most_entries(quota_bytes))
        except asyncio.CancelledError:
            keeper.remove(name)
            raise
        return Tmpfs(keeper, name, descriptor)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.end()


class _Keeper:
    """The connection to one store, whose answers come in the order of the requests."""

    def __init__(self, settings: Mapping[str, Any]):
        self._helper = Helper("store", settings, self._on_message, lambda _: self.end())
        self._answers: deque[asyncio.Future[list[int]]] = deque()
        self.dead = False

    async def start(self) -> None:
        try:
            await self._helper.start()
        except BaseException as error:
            self.dead = True
            if isinstance(error, NotStarted):
                raise SandboxError(f"sessions: {error}") from error
            raise

    def end(self) -> None:
        self.dead = True
        self._helper.end()
        while self._answers:
            self._answers.popleft().set_exception(SandboxError(_LOST))

    def remove(self, name: str) -> None:
        """Remove a file system, without waiting. A dead store has removed everything."""
        if self.dead:
            return
        answer = self._send("remove", name)
        if answer.done() and answer.exception() is not None:  # the socket is full
            asyncio.get_running_loop().call_later(_REMOVE_AGAIN_S, self.remove, name)
        else:
            answer.add_done_callback(_close)

    async def ask(self, do: str, name: str, **details: Any) -> list[int]:
        """Return the descriptors of the answer, which the caller closes. Raises SandboxError."""
        answer = self._send(do, name, **details)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(_close)
            raise

    def _send(self, do: str, name: str, **details: Any) -> asyncio.Future[list[int]]:
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        if self.dead:
            answer.set_exception(SandboxError(_LOST))
        elif self._helper.tell({"do": do, "name": name, **details}):
            self._answers.append(answer)
        else:
            answer.set_exception(SandboxError("sessions: too many requests at once"))
        return answer

    def _on_message(self, _helper: object, message: dict[str, Any], descriptors: list[int]) -> None:
        if "failed" in message:
            self._answers.popleft().set_exception(SandboxError(f"sessions: {message['failed']}"))
        else:
            self._answers.popleft().set_result(descriptors)


def _close(answer: asyncio.Future[list[int]]) -> None:
    """Close the descriptors of an answer that is no longer awaited."""
    if answer.exception() is None:
        for descriptor in answer.result():
            os.close(descriptor)
