"""The output of Ray and of a run's processes, in files in the run's folder.

Invariant: the terminal shows only the run's own lines, and no output of another process is lost: each process has a
file, `<actor or task>-<pid>.log`, and Ray's own messages go to `ray.log`. Nothing is written before `open`; earlier
messages are kept until then.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

HANDLER = "verl_dag_files"
SETTLE_S, SILENCE_S = 2.0, 0.5
"""Seconds to wait at most for the last lines of a dead process, and of silence after which none are expected."""


class ProcessLogs:
    """`quiet()` before Ray starts, `open()` when files may be written, `follow()` once Ray runs, then `close()`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._last = 0.0
        self._opened = False
        self._early: list[Mapping[str, Any]] = []
        # keeps all records until `open` gives it a file: no level reaches CRITICAL + 1
        self._records = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self._silenced: list[tuple[logging.Handler, int]] = []
        self._printed: Callable[..., None] | None = None
        """Ray's function that prints its own messages, while they go to files instead."""

    @property
    def written(self) -> bool:
        """True if `folder` has at least one file."""
        return self._opened and self.folder.is_dir() and any(self.folder.iterdir())

    def quiet(self) -> None:
        """Send Ray's messages to `ray.log`, and print only errors."""
        import ray  # noqa: F401  # the import creates Ray's log handler

        logger = logging.getLogger("ray")
        for handler in logger.handlers:
            if handler is not self._records and handler.level < logging.ERROR:
                self._silenced.append((handler, handler.level))
                handler.setLevel(logging.ERROR)
        logger.addHandler(self._records)

    def follow(self, *, console: bool) -> None:
        """Record the lines that Ray forwards to the driver (`ray.init(log_to_driver=True)`); with `console`, Ray also
        prints them."""
        from ray._private import worker
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        # Ray prints by itself that a machine was lost, with the last lines of its log
        self._printed = worker.print_to_stdstream
        worker.print_to_stdstream = lambda batch, ignore_prefix: dispatcher.emit(batch)
        if not console:
            dispatcher.remove_handler("ray_print_logs")
        dispatcher.remove_handler(HANDLER)
        dispatcher.add_handler(HANDLER, self.take)

    def open(self) -> None:
        """Write what was kept so far; from now on, write immediately."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._opened = True
            early, self._early = self._early, []
        target = logging.FileHandler(self.folder / "ray.log", delay=True, encoding="utf-8")
        target.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._records.setTarget(target)
        self._records.flush()
        self._records.flushLevel = logging.NOTSET
        for batch in early:
            self.take(batch)

    def take(self, batch: Mapping[str, Any]) -> None:
        """Append lines of a process to its file. `batch` has the format of Ray's log monitor."""
        if not any(line.strip() for line in batch["lines"]):
            return
        self._last = time.monotonic()
        with self._lock:
            if not self._opened:
                self._early.append(batch)
                return
            try:
                with (self.folder / _file_name(batch)).open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.writelines(f"{line}\n" for line in batch["lines"])
            except OSError as error:  # a full disk must end neither Ray's thread nor the run
                logging.getLogger(__name__).debug("%s: %s", self.folder, error)

    def settle(self) -> None:
        """Wait until the last lines of dead processes have arrived."""
        started = now = time.monotonic()
        while now - started < SETTLE_S and now - max(started, self._last) < SILENCE_S:
            time.sleep(SILENCE_S / 10)
            now = time.monotonic()

    def close(self) -> None:
        """Restore Ray's logger and dispatcher."""
        from ray._private import worker
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        dispatcher.remove_handler(HANDLER)
        if self._printed is not None:
            worker.print_to_stdstream = self._printed
        logger = logging.getLogger("ray")
        logger.removeHandler(self._records)
        target, self._records.target = self._records.target, None
        if target is not None:
            target.close()
        for handler, level in self._silenced:
            handler.setLevel(level)
        self._silenced.clear()


def _file_name(batch: Mapping[str, Any]) -> str:
    """Return the file name for a process: its actor or task, its process id, and its address if it is on another
    machine."""
    pid = str(batch.get("pid", ""))
    name = str(batch.get("actor_name") or batch.get("task_name") or "worker")
    parts = [] if pid in ("raylet", "autoscaler", "gcs_server") else [re.sub(r"[^\w.-]+", "_", name)]
    parts.append(pid)
    if batch.get("ip") != batch.get("localhost"):
        parts.append(str(batch.get("ip")))
    return "-".join(parts) + ".log"
