"""Working directories that persist between calls.

Invariant: only files persist. A session has one writer or some readers at a time; it is never removed while a call uses
it, and it is removed when it expires, when it is deleted, or, least recently used first, when all sessions together
hold too much and its own client needs room, unless that client asked to keep it. No client evicts sessions of another.
Its identifier, 128 random bits, is the only credential.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from recipe.sandbox.fair_queue import Overloaded
from recipe.sandbox.places import Place, Store
from recipe.sandbox.read_write_lock import ReadWriteLock

logger = logging.getLogger(__name__)

DEFAULT_TTL_S, MAX_TTL_S = 3600.0, 24 * 3600.0
DEFAULT_QUOTA_MB, MAX_QUOTA_MB = 256, 4096
_SWEEP_S = 1.0


class NoSession(Exception):
    """The session does not exist, or no longer exists."""


@dataclass
class Session:
    id: str
    place: Place
    ttl_s: float
    quota_bytes: int
    client: str = ""
    keep: bool = False
    """Never removed to make room for others."""
    used_bytes: int = 0
    touched: float = field(default_factory=time.monotonic)
    users: int = 0
    removed: bool = False
    lock: ReadWriteLock = field(default_factory=ReadWriteLock)

    @property
    def left_s(self) -> float:
        return self.touched + self.ttl_s - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the quota was exceeded, which only a place that does not enforce it allows."""
        return self.used_bytes > self.quota_bytes

    @property
    def ended(self) -> bool:
        return not self.users and (self.left_s < 0 or self.place.lost)


class Sessions:
    """All sessions of a server.

    max_bytes: limit on the files of all sessions together.
    """

    def __init__(self, store: Store, *, max_sessions: int = 1024, max_bytes: int = 8 << 30):
        self._store = store
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        # Least recently used first.
        self._sessions: dict[str, Session] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._creating = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def used_bytes(self) -> int:
        return sum(session.used_bytes for session in self._sessions.values())

    def start(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for name in list(self._sessions):
            self._remove(name)

    async def create(
        self, ttl_s: float = DEFAULT_TTL_S, quota_mb: int = DEFAULT_QUOTA_MB, client: str = "", *, keep: bool = False
    ) -> Session:
        """Return a new session. Raises Overloaded if there are too many and none of this client's is idle, ValueError
        for an invalid ttl or quota, SandboxError."""
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl must be above 0 and at most {MAX_TTL_S:g} seconds")
        if not 0 < quota_mb <= MAX_QUOTA_MB:
            raise ValueError(f"quota_mb must be above 0 and at most {MAX_QUOTA_MB}")
        async with self._creating:
            while len(self._sessions) >= self._max_sessions or self.used_bytes > self._max_bytes:
                if not self._evict(client):
                    raise Overloaded(f"{len(self._sessions)} sessions hold {self.used_bytes} bytes; delete some")
            folder = await self._store.create(quota_mb << 20)
        identifier = secrets.token_hex(16)
        session = self._sessions[identifier] = Session(identifier, folder, ttl_s, quota_mb << 20, client, keep)
        return session

    @contextmanager
    def use(self, identifier: str) -> Iterator[Session]:
        """Keep a session from being removed, and restart its time. Raises NoSession."""
        session = self._sessions.get(identifier)
        if session is None or session.ended:
            raise NoSession("no such session: it never existed, has expired, was deleted or lost")
        self._sessions[identifier] = self._sessions.pop(identifier)
        session.users += 1
        session.touched = time.monotonic()
        try:
            yield session
        finally:
            session.users -= 1
            session.touched = time.monotonic()
            if session.removed and not session.users:
                session.place.remove()

    @asynccontextmanager
    async def hold(self, identifier: str, patience_s: float, *, write: bool = True) -> AsyncIterator[Session]:
        """Use a session as its only user, or with others that only read it. Raises NoSession, Overloaded."""
        async with AsyncExitStack() as stack:
            session = stack.enter_context(self.use(identifier))
            access = session.lock.write if write else session.lock.read
            try:
                await stack.enter_async_context(access(patience_s))
            except TimeoutError:
                raise Overloaded(f"the session was busy for {patience_s:.3g} s") from None
            yield session

    async def delete(self, identifier: str) -> None:
        """Delete a session; its files are removed when no call uses it any more. Raises NoSession."""
        with self.use(identifier):
            self._remove(identifier)

    async def measure(self, session: Session) -> None:
        """Update the session's usage; evict its client's idle sessions while all together exceed the limit."""
        session.used_bytes = await session.place.used()
        while self.used_bytes > self._max_bytes and self._evict(session.client):
            pass

    def crowds(self, session: Session) -> bool:
        """Whether all sessions together exceed the limit, and this one, which is kept, more than its equal share of it:
        it must not grow, since it cannot be evicted."""
        return (
            session.keep
            and self.used_bytes > self._max_bytes
            and session.used_bytes > self._max_bytes / len(self._sessions)
        )

    def _evict(self, client: str) -> bool:
        sessions = self._sessions.items()
        own = (name for name, session in sessions if session.client == client and not (session.users or session.keep))
        idle = next(own, None)
        if idle is not None:
            self._remove(idle)
        return idle is not None

    def _remove(self, identifier: str) -> None:
        session = self._sessions.pop(identifier)
        session.removed = True
        if not session.users:
            session.place.remove()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                for name in [name for name, session in self._sessions.items() if session.ended]:
                    self._remove(name)
            except Exception:
                logger.exception("sandbox: expired sessions could not be removed; trying again")
