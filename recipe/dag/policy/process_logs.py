"""What Ray and the processes of a run print, in files of the run's folder.

Invariant: the run's own lines stand alone on the terminal, and nothing that another process printed is lost: each
process has a file, `<actor or task>-<pid>.log`, and Ray's own messages are in `ray.log`. Nothing is written before
`open`; what Ray says earlier is kept until then.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

HANDLER = "verl_dag_files"
SETTLE_S, SILENCE_S = 2.0, 0.5
"""How long the last lines of a process that died may take, and after how much silence there are none to come."""


class ProcessLogs:
    """`quiet()` before Ray starts, `open()` when files may be written, `follow()` once Ray runs, then `close()`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._last = 0.0
        self._opened = False
        self._early: list[Mapping[str, Any]] = []
        self._records = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self._silenced: list[tuple[logging.Handler, int]] = []

    @property
    def written(self) -> bool:
        """Whether there is something to look at in `folder`."""
        return self._opened and self.folder.is_dir() and any(self.folder.iterdir())

    def quiet(self) -> None:
        """Keep Ray's messages for `ray.log`; errors are printed, too."""
        import ray  # noqa: F401  which makes its handler

        logger = logging.getLogger("ray")
        for handler in logger.handlers:
            if handler is not self._records and handler.level < logging.ERROR:
                self._silenced.append((handler, handler.level))
                handler.setLevel(logging.ERROR)
        logger.addHandler(self._records)

    def follow(self, *, console: bool) -> None:
        """Take the lines that Ray forwards to the driver (`ray.init(log_to_driver=True)`). `console`: print them, as
        Ray does, too."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        if not console:
            dispatcher.remove_handler("ray_print_logs")
        dispatcher.remove_handler(HANDLER)
        dispatcher.add_handler(HANDLER, self.take)

    def open(self) -> None:
        """Write what was kept, and from now on all at once."""
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
        """Append a process's lines to its file. `batch`: as Ray's log monitor sends it."""
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
            except OSError as error:  # a full disk must not end Ray's thread, nor the run
                logging.getLogger(__name__).debug("%s: %s", self.folder, error)

    def settle(self) -> None:
        """Wait until the last lines of processes that have died are here."""
        started = now = time.monotonic()
        while now - started < SETTLE_S and now - max(started, self._last) < SILENCE_S:
            time.sleep(SILENCE_S / 10)
            now = time.monotonic()

    def close(self) -> None:
        """Leave Ray's logger and dispatcher as they were."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        dispatcher.remove_handler(HANDLER)
        logger = logging.getLogger("ray")
        logger.removeHandler(self._records)
        target, self._records.target = self._records.target, None
        if target is not None:
            target.close()
        for handler, level in self._silenced:
            handler.setLevel(level)
        self._silenced.clear()


def _file_name(batch: Mapping[str, Any]) -> str:
    """Return the file of the process that printed a batch: its actor or task and its number, and its machine where that
    is another one."""
    pid = str(batch.get("pid", ""))
    name = str(batch.get("actor_name") or batch.get("task_name") or "worker")
    parts = [] if pid in ("raylet", "autoscaler", "gcs_server") else [re.sub(r"[^\w.-]+", "_", name)]
    parts.append(pid)
    if batch.get("ip") != batch.get("localhost"):
        parts.append(str(batch.get("ip")))
    return "-".join(parts) + ".log"
