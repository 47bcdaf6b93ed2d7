"""The engine: checks a job, plans its stages and runs them in a fresh jail, forked from a loaded interpreter.

Invariant: a jail runs one job and is then discarded; when `execute` returns, or is cancelled, every process of the job
is dead. A job's clock starts when its jail takes it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe.sandbox import removal
from recipe.sandbox.jail import cgroup, exposure, files, routing
from recipe.sandbox.jail.exposure import SESSION
from recipe.sandbox.jail.handle import Jail
from recipe.sandbox.jail.helper import NotStarted
from recipe.sandbox.jail.inside import SCRATCH
from recipe.sandbox.jail.pool import JailPool
from recipe.sandbox.jail.probe import explain, refuse_unknown
from recipe.sandbox.jail.rootfs import USER
from recipe.sandbox.jail.run import NOTICE_S, WATCH_S, NotRun, Run, off_loop, uncancelled
from recipe.sandbox.jail.tmpfs import Mounts
from recipe.sandbox.jail.watchdog import Watchdog
from recipe.sandbox.job import Job
from recipe.sandbox.outcome import LANGUAGES, Execution, Outcome, SandboxError, Unavailable
from recipe.sandbox.places import Folder, Folders, Store
from recipe.sandbox.toolchain import COMPILER_MEMORY_MB, compiler, environment, interpreter

logger = logging.getLogger(__name__)

_LONGEST_S = 86_400.0
_SOURCES = {
    "python": "tmp_program.py",
    "pytest": "tmp_program.py",
    "bash": "tmp_program.sh",
    "cpp": "tmp_program.cpp",
}
_SHARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_SHARES = 32


class JailEngine:
    """Runs jobs in jails, taken from one pool per kind of interpreter. Programs of other languages, and those that need
    a fresh interpreter, run in the same jails by exec.

    root: an existing directory that nothing else uses, for the files of jobs and sessions without full isolation.
    isolation: full, landlock or rlimits. ahead: jails to keep waiting, per kind; None: 2, and 2 more per core. life:
    jails before a zygote is replaced.
    """

    store: Store
    """Makes the directories of sessions, once the engine is started."""

    def __init__(self, root: Path, isolation: str = "full", *, ahead: int | None = None, life: int = 5000):
        self.isolation = isolation
        self._root = Path(os.path.realpath(root))
        self._life = life
        self._ahead = ahead or 2 + 2 * len(os.sched_getaffinity(0))
        self._pools: dict[str, JailPool] = {}
        self._loaded: dict[str, frozenset[str]] = {"lean": frozenset()}
        self._running: set[Run] = set()
        self._jobs = 0
        self._closed = False
        self._watch: asyncio.Task[None] | None = None
        self._groups: cgroup.Groups | None = None

    async def start(self) -> None:
        """Start the engine. Raises Unavailable."""
        settings = self._settings()
        if self.isolation == "landlock":
            os.chmod(self._root, 0o711)  # users of jails pass through it
        self._groups = await asyncio.to_thread(cgroup.granted)
        settings["counted"] = self._groups is not None
        self.store = Mounts(settings) if self.isolation == "full" else Folders(self._root)
        try:
            for kind in routing.KINDS:
                if kind.useful():
                    kind_settings = {**settings, **kind.settings()}
                    pool = JailPool(
                        kind_settings, self._ahead, self._on_modules(kind.name), life=self._life, groups=self._groups
                    )
                    self._pools[kind.name] = pool
                    self._loaded[kind.name] = frozenset()
                    if kind.eager:
                        await pool.start()
        except NotStarted as error:
            await self.close()
            reason = explain(error.step, str(error), error.number) if self.isolation == "full" else str(error)
            raise Unavailable(f"{self.isolation} isolation cannot be set up: {reason}") from error
        self._watch = asyncio.get_running_loop().create_task(self._watch_jobs())

    async def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        for run in list(self._running):
            run.kill()
        for pool in self._pools.values():
            await pool.close()
        self.store.close()
        if self._groups is not None:
            await asyncio.to_thread(self._groups.close)
            self._groups = None

    def status(self) -> dict[str, object]:
        return {
            "isolation": self.isolation,
            "running": len(self._running),
            "jobs": self._jobs,
            "memory": self._groups.version if self._groups else "watchdog",
            "zygotes": {name: pool.status() for name, pool in self._pools.items()},
        }

    def number(self, kind: str) -> int | None:
        """Return the process number of a kind's zygote (precisely: of its keeper)."""
        return self._pools[kind].number()

    async def execute(self, job: Job) -> Execution:
        """Run one program; nothing of it is left running when this returns. Raises SandboxError if it cannot be run."""
        if job.language not in LANGUAGES:
            raise SandboxError(f"language {job.language!r} is not one of {', '.join(LANGUAGES)}")
        if math.isnan(job.timeout_s) or math.isnan(job.compile_timeout_s):
            raise SandboxError("a time-out must be a number of seconds, not NaN")
        if job.timeout_s <= 0 and job.language != "cpp":
            return Execution(Outcome("timeout", None, "", "", 0.0))
        _check_text(code=(job.code,), files=job.files, fetch_files=job.fetch)
        async with self._scratch() as scratch:
            packed = await _pack(job.files)
            try:
                outcomes, fetched = await self._run(job, scratch, packed)
            finally:
                for descriptor in packed:
                    os.close(descriptor)
        if job.language != "cpp":
            return Execution(outcomes[0], None, fetched)
        return Execution(outcomes[1] if len(outcomes) == 2 else None, outcomes[0], fetched)

    async def _run(self, job: Job, scratch: str, packed: list[int]) -> tuple[list[Outcome], dict[str, str]]:
        """Run the job in a jail; in a second one if the first died before the program started."""
        message = {
            "code": job.code,
            "path": f"{scratch}/{_SOURCES[job.language]}",
            "scratch": scratch,
            **self._directories(job, scratch),
        }
        kind, stages = self._plan(job, scratch)
        for attempt in (1, 2):
            async with self._lent(job) as mounts:
                jail = await self._take(kind)
                try:
                    run = Run(jail, message, stages, job.stdin, job.fetch, job.limits, [*mounts, *packed])
                except BaseException:
                    jail.close()
                    raise
            self._running.add(run)
            self._jobs += 1
            try:
                return await run.result()
            except NotRun:
                if attempt == 2 or self._closed:
                    raise
            finally:
                self._running.discard(run)
                await run.end()
            # For example, its zygote died.
            await asyncio.sleep(NOTICE_S)
        raise AssertionError("the second attempt returns or raises")

    async def _take(self, kind: str) -> Jail:
        """Return a jail of that kind, ready for the job."""
        pool = self._pools.get(kind)
        if pool is None:
            raise SandboxError("the sandbox is not started")
        return await pool.take()

    def _on_modules(self, kind: str) -> Callable[[list[str]], None]:
        def remember(modules: list[str]) -> None:
            self._loaded[kind] = frozenset(modules)

        return remember

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[str]:
        """Yield the directory of one job's program: the same in every namespace, else one for each job."""
        if self.isolation == "full":
            yield SCRATCH
            return
        directory = tempfile.mkdtemp(prefix="job-", dir=self._root)
        try:
            yield directory
        finally:
            # In a thread: a program may have made any number of files.
            await uncancelled(asyncio.to_thread(removal.remove, directory))

    def _directories(self, job: Job, scratch: str) -> dict[str, Any]:
        """Return where the job works and what it shares, as it will see them. Raises SandboxError."""
        shares = _names(job.shares)
        if self.isolation == "full":
            work = job.work is not None
            return {"work": work, "shares": shares, "directory": SESSION if work else scratch}
        if shares:
            raise SandboxError("sharing one session's files with another needs isolation full")
        directory = scratch
        if isinstance(job.work, Folder):
            job.work.directory()
            directory = str(job.work.path)
        return {"work": False, "shares": [], "directory": directory}

    @asynccontextmanager
    async def _lent(self, job: Job) -> AsyncIterator[list[int]]:
        """Yield mounts of the job's sessions, its own first, as many as its message announces. Raises SandboxError."""
        lent: list[int] = []
        try:
            if self.isolation == "full":
                if job.work is not None:
                    lent.append(await job.work.for_job(read_only=False))
                for share in job.shares.values():
                    lent.append(await share.for_job(read_only=True))
            yield lent
        finally:
            for descriptor in lent:
                os.close(descriptor)

    def _settings(self) -> dict[str, Any]:
        """Return the settings of all jails. Raises Unavailable."""
        refuse_unknown(self.isolation)
        try:
            expose = exposure.interpreter()
        except ValueError as error:
            raise Unavailable(str(error)) from error
        packages = exposure.packages()
        variables = environment("/tmp") | ({"PYTHONPATH": os.pathsep.join(packages)} if packages else {})
        return {
            "expose": expose,
            "packages": packages,
            "wall": self.isolation,
            "root": str(self._root),
            "user": USER,
            "environment": variables,
        }

    def _plan(self, job: Job, scratch: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the kind of jail, and the processes to run in it one after the other."""
        run = {"argv": None, "timeout_s": min(job.timeout_s, _LONGEST_S), "limits": vars(job.limits)}
        source = f"{scratch}/{_SOURCES[job.language]}"
        if job.language in ("bash", "pytest"):
            return "lean", [{**run, "argv": interpreter(job.language, source, job.args)}]
        if job.language == "cpp":
            binary = f"{scratch}/main.out"
            compiler_limits = replace(job.limits, memory_mb=COMPILER_MEMORY_MB, cpu_s=None)
            compiled = {
                "argv": compiler(source, binary),
                "timeout_s": min(job.compile_timeout_s, _LONGEST_S),
                "limits": vars(compiler_limits),
            }
            return "lean", [compiled, {**run, "argv": [binary]}]
        names = [*job.files, *(os.listdir(job.work.directory()) if job.work is not None else ())]
        kind = routing.choose(job.code, names, self._loaded)
        if kind == routing.COLD:
            return "lean", [{**run, "argv": interpreter("python", source)}]
        return kind, [run]

    async def _watch_jobs(self) -> None:
        """Stop the jobs whose processes use too much memory together."""
        with closing(Watchdog()) as watchdog:
            while True:
                await asyncio.sleep(WATCH_S)
                try:
                    await self._watch_once(watchdog)
                except Exception:
                    logger.exception("sandbox: memory could not be measured; trying again")

    async def _watch_once(self, watchdog: Watchdog) -> None:
        if self._groups is not None:
            for run in list(self._running):
                run.check_group()
            return
        jobs = {run: (number, run.allowed()) for run in self._running if (number := run.watched())}
        for run in await watchdog.excessive(jobs) if jobs else ():
            run.exceed()


async def _pack(contents: Mapping[str, str | None]) -> list[int]:
    """Return the descriptor of a file in memory with a job's files, if it has any."""
    texts = {name: text for name, text in contents.items() if text is not None and files.SKIPPED not in name}
    if not texts:
        return []
    packed = os.memfd_create("files", os.MFD_CLOEXEC)
    try:
        await off_loop(sum(map(len, texts.values())), lambda: files.pack(texts, packed))
    except BaseException:
        os.close(packed)
        raise
    return [packed]


def _check_text(**named: Iterable[str]) -> None:
    """Raise SandboxError for a text that cannot be written as UTF-8."""
    for field, texts in named.items():
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            raise SandboxError(f"{field}: lone surrogates cannot be written as UTF-8") from error


def _names(shares: Iterable[str]) -> list[str]:
    """Return the names, checked. Raises SandboxError."""
    names = list(shares)
    if len(names) > _SHARES:
        raise SandboxError(f"shares: at most {_SHARES} sessions can be shared with one job, not {len(names)}")
    for name in names:
        if not _SHARE.fullmatch(name):
            raise SandboxError(f"shares: {name!r} must be at most 64 letters, digits, '.', '_' and '-'")
    return names
