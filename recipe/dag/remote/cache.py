"""Answers of API policies in a SQLite file, so that the same request is paid for once.

Invariant: an answer is stored as the server gave it, once it could be read, and found by a digest of all that
determines it: provider, URL, request and, where it is sampled, seed. Several processes, and several runs, may use one
file. A file that is damaged is one clear error, never a missing answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from recipe.dag.core.errors import UserError

BUSY_S = 60.0
"""Longest wait for another process's transaction."""
_FORM = 1
"""Changes when the same key would mean something else."""

# SQLite waits for no other process where this changes the mode, which the first user of a file does
_while_busy = Retrying(
    retry=retry_if_exception(lambda error: "database is locked" in str(error)),
    wait=wait_random(0, 0.05),
    stop=stop_after_delay(BUSY_S),
    reraise=True,
)

T = TypeVar("T")


class Cache:
    """One cache file. Safe for threads and event loops."""

    def __init__(self, path: str | Path, where: str) -> None:
        """Open the file if there is one; the first use creates it. `where` names the option in errors. Raises
        UserError."""
        self._path, self._where = Path(path).expanduser(), where
        self._lock = threading.Lock()
        self._process = 0
        self._database: sqlite3.Connection | None = None
        if self._path.exists():
            self._guarded(lambda database: database.execute("SELECT 1 FROM answers WHERE key = ''").fetchone())

    async def get(self, key: str) -> dict[str, Any] | None:
        """Return the stored answer to a request. Raises UserError."""

        def read(database: sqlite3.Connection) -> dict[str, Any] | None:
            row = database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
            return None if row is None else json.loads(row[0])

        return await asyncio.to_thread(self._guarded, read)

    async def put(self, key: str, answer: str) -> None:
        """Store an answer's JSON text. Of several answers to one request, the first stays. Raises UserError."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("INSERT OR IGNORE INTO answers (key, answer) VALUES (?, ?)", (key, answer))

        await asyncio.to_thread(self._guarded, write)

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None

    def _guarded(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                return work(self._connection())
            except (sqlite3.Error, OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise UserError(
                    f"{self._where}: {self._path} cannot be used as a cache ({reason}); delete it or name another file"
                ) from error

    def _connection(self) -> sqlite3.Connection:
        if self._database is None or self._process != os.getpid():  # a connection must not cross a fork
            self._path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            _while_busy(database.execute, "PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
            self._database, self._process = database, os.getpid()
        return self._database


def cache_key(provider: str, url: str, path: str, body: Mapping[str, Any], seed: int | None) -> str:
    """Return the digest of a request. `body`: without a seed. `seed`: None if the answer does not depend on it."""
    text = json.dumps([_FORM, provider, url, path, body, seed], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
