"""What the engines that make jails have in common: checking a job, planning its stages, running them.

Invariant: a jail runs one job and is gone; when `execute` returns, or is cancelled, every process of the job is dead.
A job's clock starts when its jail takes it.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe.dag.sandbox import beneath, workspace
from recipe.dag.sandbox.jail import exposure, routing
from recipe.dag.sandbox.jail.handle import Jail
from recipe.dag.sandbox.jail.inside import SCRATCH
from recipe.dag.sandbox.jail.probe import refuse_unknown
from recipe.dag.sandbox.jail.rootfs import USER
from recipe.dag.sandbox.jail.run import WATCH_S, JailDied, Run
from recipe.dag.sandbox.limits import Limits
from recipe.dag.sandbox.outcome import LANGUAGES, Execution, Outcome, SandboxError, Unavailable
from recipe.dag.sandbox.toolchain import COMPILER_MEMORY_MB, compiler, environment, interpreter

_LONGEST_S = 86_400.0
_AGAIN_S = 0.1
"""Until what dies with a zygote is dead, and known to be."""
_PATHS = {
    "python": f"{SCRATCH}/tmp_program.py",
    "bash": f"{SCRATCH}/tmp_program.sh",
    "cpp": f"{SCRATCH}/tmp_program.cpp",
}
COLD_PYTHON = interpreter("python", _PATHS["python"])
_SHARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class JailEngine(ABC):
    """root: an existing directory; all `work` and `shares` lie under it."""

    isolation = "full"
    name = ""
    owner: int | None = None

    def __init__(self, root: Path, *, disk_mb: int = 256, inodes: int = 20_000):
        self._root = Path(os.path.realpath(root))
        self._disk_mb, self._inodes = disk_mb, inodes
        self._loaded: dict[str, frozenset[str]] = {"lean": frozenset()}
        self._running: set[Run] = set()
        self._jobs = 0
        self._closed = False
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises Unavailable."""
        if self.owner is not None:
            with workspace.opened(self._root) as root:
                os.fchmod(root, 0o711)
        self._watch = asyncio.get_running_loop().create_task(self._watch_jobs())

    async def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        for run in list(self._running):
            run.kill()

    def status(self) -> dict[str, object]:
        return {
            "engine": self.name,
            "isolation": self.isolation,
            "running": len(self._running),
            "jobs": self._jobs,
            "memory": "watchdog",
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
        place = self._inside(work) if work is not None else None
        kind, stages = self._plan(code, language, timeout_s, compile_timeout_s, limits, files or {}, work)
        job = {
            "code": code,
            "path": _PATHS[language],
            "files": dict(files or {}),
            "work": place,
            "shares": {_share(name): self._inside(path) for name, path in (shares or {}).items()},
        }
        wanted = list(fetch)
        _check_text(code=(code,), files=job["files"], fetch_files=wanted)
        for attempt in (1, 2):
            if attempt == 2:
                await asyncio.sleep(_AGAIN_S)
            run = Run(await self._take(kind, job), job, stages, stdin, wanted, limits)
            self._running.add(run)
            self._jobs += 1
            try:
                outcomes, found = await run.result()
                if language != "cpp":
                    return Execution(outcomes[0], None, found)
                return Execution(outcomes[1] if len(outcomes) == 2 else None, outcomes[0], found)
            except JailDied:
                # It went with its zygote, say. Nothing that the job did was outside of it, but in a lasting directory.
                if attempt == 2 or work is not None or self._closed:
                    raise
            finally:
                self._running.discard(run)
                await run.end()
        raise AssertionError("the second attempt returns or raises")

    @abstractmethod
    async def _take(self, kind: str, job: Mapping[str, Any]) -> Jail:
        """A jail of that kind, ready for the job."""

    def _settings(self) -> dict[str, Any]:
        """What every jail is told. Raises Unavailable."""
        refuse_unknown()
        try:
            expose = exposure.interpreter()
        except ValueError as error:
            raise Unavailable(str(error)) from error
        packages = exposure.packages()
        seen = environment("/tmp") | ({"PYTHONPATH": os.pathsep.join(packages)} if packages else {})
        return {
            "expose": expose,
            "packages": packages,
            "host": str(self._root),
            "user": USER,
            "disk_mb": self._disk_mb,
            "inodes": self._inodes,
            "environment": seen,
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
        run = {"argv": None, "timeout_s": min(timeout_s, _LONGEST_S), "limits": vars(limits)}
        if language == "bash":
            return "lean", [{**run, "argv": interpreter("bash", _PATHS["bash"])}]
        if language == "cpp":
            binary = f"{SCRATCH}/main.out"
            generous = replace(limits, memory_mb=COMPILER_MEMORY_MB, cpu_s=None)
            compiled = {
                "argv": compiler(_PATHS["cpp"], binary),
                "timeout_s": min(compile_timeout_s, _LONGEST_S),
                "limits": vars(generous),
            }
            return "lean", [compiled, {**run, "argv": [binary]}]
        names = [*files, *(os.listdir(work) if work is not None else ())]
        kind = routing.choose(code, names, self._loaded)
        if kind == routing.COLD:
            return "lean", [{**run, "argv": COLD_PYTHON}]
        return kind, [run]

    def _inside(self, path: Path) -> str:
        """`path` relative to the root; made reachable for the jobs' user. Raises SandboxError."""
        place = os.path.relpath(os.path.realpath(path), self._root)
        if place.split(os.sep)[0] in ("..", ".") or not os.path.isdir(path):
            raise SandboxError(f"{path} is no directory under the sandbox's root {self._root}")
        if self.owner is not None:
            self._hand_over(tuple(place.split(os.sep)))
        return place

    def _hand_over(self, parts: tuple[str, ...]) -> None:
        """Give a directory under the root to the jobs' user, and let that user pass through those above it. By
        descriptor: what is changed lies under the root, whatever its name leads to."""
        with workspace.opened(self._root) as root:
            for depth in range(1, len(parts) + 1):
                folder = beneath.open_folder(root, parts[:depth])
                try:
                    status = os.fstat(folder)
                    if depth < len(parts):
                        os.fchmod(folder, status.st_mode & 0o7777 | 0o711)
                    elif status.st_uid != self.owner:
                        os.fchown(folder, self.owner, self.owner)
                finally:
                    os.close(folder)

    async def _watch_jobs(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for run in list(self._running):
                run.check()


def _check_text(**named: Iterable[str]) -> None:
    """Raises SandboxError for what cannot be written as UTF-8."""
    for what, texts in named.items():
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            raise SandboxError(f"{what}: lone surrogates cannot be written as UTF-8") from error


def _share(name: str) -> str:
    if not _SHARE.fullmatch(name):
        raise SandboxError(f"shares: {name!r} is not made of letters, digits, '.', '_' and '-'")
    return name
