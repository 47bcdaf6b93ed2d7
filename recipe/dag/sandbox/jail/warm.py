"""The warm engine: each job in a jail of its own, forked from an interpreter that is loaded already.

Invariant: a jail runs one job and is gone; when `execute` returns, or is cancelled, every process of the job is dead.
A job's clock starts when its jail, which was ready before, takes it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recipe.dag.sandbox.jail import exposure, protocol, routing, supervisor, watchdog
from recipe.dag.sandbox.jail.nursery import Jail, NotStarted, Nursery
from recipe.dag.sandbox.jail.pump import Pump
from recipe.dag.sandbox.jail.rootfs import USER
from recipe.dag.sandbox.limits import Limits
from recipe.dag.sandbox.outcome import LANGUAGES, Execution, Outcome, SandboxError, Unavailable

_COMPILER_MEMORY_MB = 4096
_LONGEST_S = 86_400.0
_PUMP_AFTER_S = 0.005
_WATCH_S = 0.05
_GRACE_S = 5.0
"""For a jail to end its job and hand back files, before it is killed whole."""
_STOP_AGAIN_S = 0.2
_SHARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class WarmEngine:
    """root: an existing directory; all `work` and `shares` lie under it. ahead: jails that wait, per kind."""

    isolation = "full"
    name = "warm"

    def __init__(self, root: Path, *, ahead: int | None = None, disk_mb: int = 256, inodes: int = 20_000):
        self._root = Path(os.path.realpath(root))
        self._ahead = ahead or 2 + 2 * len(os.sched_getaffinity(0))
        self._disk_mb, self._inodes = disk_mb, inodes
        self._nurseries: dict[str, Nursery] = {}
        self._loaded: dict[str, frozenset[str]] = {}
        self._running: set[_Run] = set()
        self._jobs = 0
        self._watch: asyncio.Task[None] | None = None
        self.owner = USER if os.geteuid() == 0 else None

    async def start(self) -> None:
        """Raises Unavailable."""
        from recipe.dag.sandbox.jail.probe import explain

        settings = self._settings()
        if self.owner is not None:
            os.chmod(self._root, 0o711)
        for kind in routing.KINDS:
            if kind.useful():
                self._nurseries[kind.name] = Nursery({**settings, **kind.settings()}, self._ahead)
                self._loaded[kind.name] = frozenset()
                try:
                    if kind.eager:
                        await self._nurseries[kind.name].start()
                except NotStarted as error:
                    await self.close()
                    raise Unavailable(explain(error.step, str(error), error.number)) from error
        self._watch = asyncio.get_running_loop().create_task(self._watch_memory())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        for run in list(self._running):
            run.kill()
        for nursery in self._nurseries.values():
            await nursery.close()

    def status(self) -> dict[str, object]:
        return {
            "engine": self.name,
            "isolation": self.isolation,
            "running": len(self._running),
            "jobs": self._jobs,
            "memory": "watchdog",
            "zygotes": {name: nursery.status() for name, nursery in self._nurseries.items()},
        }

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
        """See Engine."""
        if language not in LANGUAGES:
            raise SandboxError(f"language {language!r} is not one of {', '.join(LANGUAGES)}")
        if math.isnan(timeout_s) or math.isnan(compile_timeout_s):
            raise SandboxError("a time-out must be a number of seconds, not NaN")
        if timeout_s <= 0 and language != "cpp":
            return Execution(Outcome("timeout", None, "", "", 0.0))
        kind, stages = self._plan(code, language, timeout_s, compile_timeout_s, limits, files or {}, work)
        job = {
            "code": code,
            "language": language,
            "files": dict(files or {}),
            "fetch": list(fetch),
            "work": self._inside(work) if work is not None else None,
            "shares": {_share(name): self._inside(path) for name, path in (shares or {}).items()},
            "stages": stages,
        }
        _check_text(job, stdin)
        jail = await self._nurseries[kind].take()
        run = _Run(jail, job, stdin, limits)
        self._running.add(run)
        self._jobs += 1
        try:
            return await run.result()
        finally:
            self._running.discard(run)
            await run.end()

    def _settings(self) -> dict[str, Any]:
        """What every zygote is told."""
        try:
            expose = exposure.interpreter()
        except ValueError as error:
            raise Unavailable(str(error)) from error
        packages = exposure.packages()
        environment = {
            "PATH": os.pathsep.join((os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin")),
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "MPLBACKEND": "Agg",
            # Every thread of a BLAS reserves address space, jobs share the cores, and threads do not survive a fork.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ},
            **({"PYTHONPATH": os.pathsep.join(packages)} if packages else {}),
        }
        return {
            "expose": expose,
            "packages": packages,
            "host": str(self._root),
            "user": USER,
            "disk_mb": self._disk_mb,
            "inodes": self._inodes,
            "environment": environment,
        }

    def _plan(
        self,
        code: str,
        language: str,
        timeout_s: float,
        compile_timeout_s: float,
        limits: Limits,
        files: Mapping[str, str | None],
        work: Path | None,
    ) -> tuple[str, list[dict[str, Any]]]:
        """The kind of jail, and the processes to run in it one after the other."""
        run = {"argv": None, "timeout_s": min(timeout_s, _LONGEST_S), "limits": asdict(limits)}
        if language == "bash":
            return "lean", [{**run, "argv": [_found("bash"), "--noprofile", "--norc", "{}"]}]
        if language == "cpp":
            binary = f"{supervisor.SCRATCH}/main.out"
            compiler = replace(limits, memory_mb=_COMPILER_MEMORY_MB, cpu_s=None)
            compiled = {
                "argv": [_found("g++"), "-std=c++17", "-O1", "-o", binary, "{}"],
                "timeout_s": min(compile_timeout_s, _LONGEST_S),
                "limits": asdict(compiler),
            }
            return "lean", [compiled, {**run, "argv": [binary]}]
        names = [*files, *(os.listdir(work) if work is not None else ())]
        kind = routing.choose(code, names, self._loaded)
        if kind == routing.COLD:
            return "lean", [{**run, "argv": [sys.executable, "-u", "{}"]}]
        return kind, [run]

    def _inside(self, path: Path) -> str:
        """`path` relative to the root; made reachable for the jobs' user. Raises SandboxError."""
        place = os.path.relpath(os.path.realpath(path), self._root)
        if place.split(os.sep)[0] in ("..", ".") or not os.path.isdir(path):
            raise SandboxError(f"{path} is no directory under the sandbox's root {self._root}")
        if self.owner is not None:
            status = os.stat(path)
            if status.st_uid != self.owner:
                os.chown(path, self.owner, self.owner)
            for parent in Path(self._root, place).parents:
                if parent == self._root:
                    break
                os.chmod(parent, parent.stat().st_mode & 0o7777 | 0o711)
        return place

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for run in list(self._running):
                run.check_memory()


class _Run:
    """One job in its jail."""

    def __init__(self, jail: Jail, job: dict[str, Any], stdin: str | None, limits: Limits):
        self._jail = jail
        self._job = job
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._reports: list[dict[str, Any]] = []
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._pumps = [Pump(limits.output_bytes) for _ in range(2 * len(job["stages"]))]
        self._files = os.memfd_create("files", os.MFD_CLOEXEC) if job["fetch"] else None
        self._too_much = False
        self._clean = False
        self._stops = 0
        self._number = 0
        source = _stdin(stdin)
        try:
            passed = [source, *(pump.write_end for pump in self._pumps)]
            protocol.send(jail.connection, job, [*passed, *([self._files] if self._files is not None else [])])
        except OSError:
            self._break()
        finally:
            os.close(source)
            for pump in self._pumps:
                pump.sent()
        self._started = self._loop.time()
        self._loop.add_reader(jail.connection, self._hear)
        self._pumping = self._loop.call_later(_PUMP_AFTER_S, self._pump)
        self._deadline = self._loop.call_later(max(0.0, job["stages"][0]["timeout_s"]), self._stop)

    async def result(self) -> Execution:
        """Raises SandboxError when the jail broke, or refused the job."""
        await self._done
        for pump in self._pumps:
            pump.close()
        outcomes = [self._outcome(number) for number in range(len(self._reports))]
        compiled = outcomes[0] if self._job["language"] == "cpp" else None
        ran = outcomes[-1] if len(outcomes) == len(self._job["stages"]) else None
        return Execution(ran, compiled, self._fetched())

    def kill(self) -> None:
        self._jail.signal(signal.SIGKILL)

    async def end(self) -> None:
        """Let go of everything; waits for the jail's death unless the jail has said that all is dead."""
        self._pumping.cancel()
        self._deadline.cancel()
        self._loop.remove_reader(self._jail.connection)
        try:
            if not self._clean:
                self.kill()
                await _uncancelled(self._jail.gone())
        finally:
            for pump in self._pumps:
                pump.close()
            if self._files is not None:
                os.close(self._files)
            self._jail.close()

    def check_memory(self) -> None:
        limit = self._limits.memory_mb << 20
        if limit <= 0 or self._done.done() or self._loop.time() - self._started < _WATCH_S:
            return
        self._number = self._number or self._jail.number()
        if self._number and watchdog.exceeds(self._number, limit):
            self._too_much = True
            self._stop()

    def _hear(self) -> None:
        try:
            while not self._done.done():
                message, _ = protocol.receive(self._jail.connection)
                if "refused" in message:
                    self._clean = False
                    self._done.set_exception(SandboxError(message["refused"]))
                    return
                self._reports.append(message)
                self._deadline.cancel()
                if message["last"]:
                    self._clean = True
                    self._done.set_result(None)
                else:
                    following = self._job["stages"][len(self._reports)]
                    self._deadline = self._loop.call_later(max(0.0, following["timeout_s"]), self._stop)
        except BlockingIOError:
            return
        except (protocol.Closed, ValueError, KeyError):
            self._break()

    def _break(self) -> None:
        """The jail went away without a word. After a stop that is our doing; else something is wrong with it."""
        if self._done.done():
            return
        if self._stops:
            self._reports.append({"code": None, "seconds": self._loop.time() - self._started})
            self._done.set_result(None)
        else:
            self._done.set_exception(SandboxError("the jail died; the job may be tried again"))

    def _stop(self) -> None:
        """Tell the jail to end the job. The job can get in the way of a signal, so say it again, then kill."""
        self._deadline.cancel()
        self._stops += 1
        if self._stops * _STOP_AGAIN_S > _GRACE_S:
            self.kill()
            return
        self._jail.signal(supervisor.STOP)
        self._deadline = self._loop.call_later(_STOP_AGAIN_S, self._stop)

    def _pump(self) -> None:
        for pump in self._pumps:
            pump.start()

    def _outcome(self, number: int) -> Outcome:
        report = self._reports[number]
        stdout, stderr = (pump.text() for pump in self._pumps[2 * number : 2 * number + 2])
        code, seconds = report["code"], report["seconds"]
        if code is None and self._too_much:
            note = f"[sandbox] killed: more than {self._limits.memory_mb} MiB of memory\n"
            return Outcome("finished", -signal.SIGKILL, stdout, stderr + note, seconds)
        if code is None or code == -signal.SIGXCPU:
            return Outcome("timeout", None, stdout, stderr, seconds)
        return Outcome("finished", code, stdout, stderr, seconds)

    def _fetched(self) -> dict[str, str]:
        if self._files is None:
            return {}
        size = os.fstat(self._files).st_size
        with suppress(ValueError):
            return json.loads(os.pread(self._files, size, 0)) if size else {}
        return {}


def _stdin(text: str | None) -> int:
    """A descriptor to read `text` from. What fits a pipe is a pipe, as programs expect; nobody has to feed it."""
    if text is None:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= 1 << 16:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.write(write, data)
        os.close(write)
        return read
    with open(os.memfd_create("stdin", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(data)
        # Opened anew: read-only, and at its beginning.
        return os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)


def _check_text(job: Mapping[str, Any], stdin: str | None) -> None:
    """Raises SandboxError for what cannot be written as UTF-8."""
    for what, texts in (("code", (job["code"],)), ("files", job["files"]), ("fetch_files", job["fetch"])):
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            raise SandboxError(f"{what}: lone surrogates cannot be written as UTF-8") from error


def _share(name: str) -> str:
    if not _SHARE.fullmatch(name):
        raise SandboxError(f"shares: {name!r} is not made of letters, digits, '.', '_' and '-'")
    return name


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise SandboxError(f"{program} is not installed on the machine that runs the sandbox")
    return path


async def _uncancelled(work) -> None:
    """Wait for it even while being cancelled; the cancellation follows."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
