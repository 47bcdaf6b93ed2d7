"""Running one program in a fresh process, and nothing of it afterwards.

Invariant: when `execute` returns or is cancelled, the job's processes, daemons included, are dead and its directory is
gone. Limits are rlimits and a watch on the number of processes. That bounds accidents; it is no security boundary: the
code runs as this user, sees the file system and the network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from recipe.dag.sandbox import survivors, workspace
from recipe.dag.sandbox.limits import Limits
from recipe.dag.sandbox.outcome import LANGUAGES, Execution, Outcome, SandboxError
from recipe.dag.sandbox.process import Drain, spawn, uncancelled
from recipe.dag.sandbox.toolchain import COMPILER_MEMORY_MB, compiler, environment, interpreter

logger = logging.getLogger(__name__)

_SOURCES = {"python": "main.py", "bash": "main.sh", "cpp": "main.cpp"}
_WATCH_S = 0.1
_KILL_S = 10.0


class Executor:
    """Runs jobs under `root`, a directory of its own.

    exclusive: this process runs nothing but jobs, so any other child of it is a job's runaway and is ended.
    """

    name = isolation = "rlimits"
    owner: int | None = None

    def __init__(self, root: Path, *, exclusive: bool = False):
        self._root = root
        self._exclusive = exclusive
        self._running: dict[Path, int | None] = {}
        survivors.become_subreaper()

    async def start(self) -> None:
        """Nothing to prepare."""

    async def close(self) -> None:
        """Nothing to end: a job ends with its `execute`."""

    def status(self) -> dict[str, object]:
        return {"engine": self.name, "isolation": self.isolation, "running": len(self._running)}

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
        """Run `code` with `files` (base64 by relative name) around it. Raises SandboxError when it cannot be set up.

        work: a directory that lasts, to run in, for one job at a time. `shares` need an engine that can mount.
        """
        if language not in LANGUAGES:
            raise SandboxError(f"language {language!r} is not one of {', '.join(LANGUAGES)}")
        if shares:
            raise SandboxError("sharing one session's files with another needs --isolation=full")
        directory = work or workspace.create(self._root)
        self._running[directory] = None
        try:
            source = directory / _SOURCES[language]
            if source.name in (files or {}):
                raise SandboxError(f"files: {source.name!r} is the name of the program itself")
            workspace.write_files(directory, files or {})
            workspace.write_file(directory, source.name, code.encode())
            compiled = None
            if language == "cpp":
                command = ["./main.out"]
                generous = Limits(memory_mb=COMPILER_MEMORY_MB, output_bytes=limits.output_bytes)
                build = compiler(source.name, "main.out")
                compiled = await self._run(build, directory, compile_timeout_s, None, generous)
                if compiled.return_code != 0:
                    return Execution(None, compiled)
            else:
                command = interpreter(language, source.name)
            run = await self._run(command, directory, timeout_s, stdin, limits)
            return Execution(run, compiled, workspace.fetch_files(directory, fetch))
        finally:
            del self._running[directory]
            if work is None:
                await asyncio.shield(asyncio.to_thread(workspace.remove, directory))
            else:
                workspace.delete_files(work, (_SOURCES[language], "main.out"))

    async def _run(
        self, argv: Sequence[str], directory: Path, timeout_s: float, stdin: str | None, limits: Limits
    ) -> Outcome:
        started = time.monotonic()
        outputs = Drain(limits.output_bytes), Drain(limits.output_bytes)
        seen = environment(str(directory)) | {"TMPDIR": str(directory), survivors.MARKER: str(directory)}
        process, ended = spawn(limits.launch(argv, timeout_s), directory, seen, stdin, outputs)
        self._running[directory] = process.pid
        timed_out, note = False, ""
        try:
            while not ended.done():
                left = timeout_s - (time.monotonic() - started)
                if left <= 0:
                    timed_out = True
                    break
                await asyncio.wait([ended], timeout=min(left, _WATCH_S))
                if not ended.done() and self._count(directory, process.pid) > limits.processes:
                    note = f"[sandbox] killed: more than {limits.processes} processes\n"
                    break
        finally:
            seconds = time.monotonic() - started
            await uncancelled(self._end(directory, process, ended))
            for output in outputs:
                output.close()
        stdout, stderr = (output.text() for output in outputs)
        # The directory's random name would make every traceback unique.
        stderr = stderr.replace(f'File "{directory}/', 'File "') + note
        if timed_out or process.returncode == -signal.SIGXCPU:
            return Outcome("timeout", None, stdout, stderr, seconds)
        return Outcome("finished", process.returncode, stdout, stderr, seconds)

    async def _end(self, directory: Path, process: subprocess.Popen[bytes], ended: asyncio.Future[None]) -> None:
        """Kill and collect all of a job's processes."""
        known = survivors.descendants(process.pid) | self._runaways(directory)
        # The leader is not collected yet, so its number cannot have become another's group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([ended])
        process.wait()
        self._running[directory] = None
        pause, deadline = 0.001, time.monotonic() + _KILL_S
        while left := self._runaways(directory) | (known & survivors.children(os.getpid())):
            survivors.kill_children(left)
            if not survivors.reap(left):
                continue
            if time.monotonic() > deadline:
                logger.warning("sandbox: processes %s of a finished job do not die", sorted(left))
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _runaways(self, directory: Path) -> set[int]:
        """Our living children, leaders aside, that are this job's or nobody's."""
        candidates = survivors.children(os.getpid()) - {pid for pid in self._running.values() if pid is not None}
        if self._exclusive:
            candidates = survivors.reap(candidates)
        found = set()
        for pid in candidates:
            where = survivors.owner(pid)
            someones = any(survivors.belongs(where, other) for other in self._running)
            if survivors.belongs(where, directory) or (self._exclusive and not someones):
                found.add(pid)
        return found

    def _count(self, directory: Path, leader: int) -> int:
        return 1 + len(survivors.descendants(leader)) + len(self._runaways(directory))
