"""The bubblewrap engine: each job in a jail that bubblewrap makes, with a fresh interpreter.

Invariant: bubblewrap alone makes the namespaces and loads the filter; what goes on inside, limits, files and stages, is
the same supervisor's. So one engine can be held against the other. Slower, and nothing is warm.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe.dag.sandbox.jail import protocol, rootfs, routing, seccomp
from recipe.dag.sandbox.jail.engine import COLD_PYTHON, JailEngine
from recipe.dag.sandbox.jail.exposure import SESSION, under
from recipe.dag.sandbox.jail.handle import Jail
from recipe.dag.sandbox.jail.helper import Helper, NotStarted
from recipe.dag.sandbox.jail.launcher import FIRST, STAGE, staged
from recipe.dag.sandbox.jail.probe import explain
from recipe.dag.sandbox.outcome import SandboxError, Unavailable

logger = logging.getLogger(__name__)

_CODE = "/.code"
"""Where the supervisor's own modules are, inside."""
_PACKAGE = Path(__file__).resolve().parents[1]
_STARTER = f"""
import os, sys
sys.path[0] = {_CODE!r}
from recipe.dag.sandbox.jail.bwrapped import main
main(int(sys.argv[1]))
"""
_START_S = 30.0
_ASK_AGAIN_S = 0.005


class BwrapEngine(JailEngine):
    """Inodes are not capped, since bubblewrap cannot."""

    name = "bwrap"

    def __init__(self, root: Path, *, disk_mb: int = 256):
        super().__init__(root, disk_mb=disk_mb)
        self.owner = rootfs.USER if os.geteuid() == 0 else None
        self._fixed: list[str] = []
        self._told: dict[str, Any] = {}
        self._sources: list[str] = []
        """What is bound, by the number that the launcher knows it by."""
        self._launcher: Helper | None = None
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise Unavailable("engine 'bwrap' needs bubblewrap: install the package bubblewrap (apt, dnf, pacman)")
        settings = self._settings()
        self._fixed = [program, *self._arguments(settings)]
        places = [rootfs.place(path) for path in self._elsewhere(settings)]
        self._told = {"environment": settings["environment"], "places": places}
        self._bound(str(self._root))
        self._launcher = Helper("launcher", self._launcher_settings(settings), self._ignore, self._mourn)
        try:
            await super().start()
            await self._launcher.start()
            # Generous: the first start of an interpreter reads it from the disk.
            tried = await self.execute("print(1)", timeout_s=60.0)
        except (NotStarted, SandboxError) as error:
            await self.close()
            step, number = (error.step, error.number) if isinstance(error, NotStarted) else ("bubblewrap", None)
            raise Unavailable(explain(step, str(error), number)) from error
        if tried.run is None or tried.run.stdout != "1\n":
            await self.close()
            raise Unavailable(explain("bubblewrap", f"a first program answered {tried.run}", None))

    async def close(self) -> None:
        await super().close()
        if self._launcher is not None:
            self._launcher.end()

    async def _take(self, kind: str, job: Mapping[str, Any]) -> Jail:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said, says = os.pipe2(os.O_CLOEXEC)
        heard, words = os.pipe2(os.O_CLOEXEC)
        rules = os.memfd_create("seccomp", os.MFD_CLOEXEC)
        open_ = [said, says, heard, words, rules]
        try:
            if self._starting is not None:
                await asyncio.shield(self._starting)
            os.write(rules, seccomp.program())
            os.lseek(rules, 0, os.SEEK_SET)
            connection, info, filter_ = range(FIRST, FIRST + 3)
            arguments = [*self._granted(job), "--info-fd", str(info), "--seccomp", str(filter_)]
            arguments += ["--remount-ro", "/", "--", sys.executable, "-c", _STARTER, str(connection)]
            while not self._launcher.tell({"arguments": arguments}, [theirs.fileno(), says, rules, words]):
                await asyncio.sleep(_ASK_AGAIN_S)
            theirs.close()
            for descriptor in (says, words):
                os.close(descriptor)
                open_.remove(descriptor)
            jail = Jail(ours, os.pidfd_open(await self._first_process(said)), words=os.dup(heard))
        except BaseException as error:
            ours.close()
            if isinstance(error, ValueError | OSError | TimeoutError | NotStarted):
                os.set_blocking(heard, False)
                with suppress(BlockingIOError):
                    error = os.read(heard, 4096).decode("utf-8", "replace").strip() or error
                raise SandboxError(f"bubblewrap: {error}") from None
            raise
        finally:
            theirs.close()
            for descriptor in open_:
                os.close(descriptor)
        protocol.send(ours, self._told)
        return jail

    def _ignore(self, _launcher: object, message: object, _descriptors: object) -> None:
        raise ValueError(f"a launcher says nothing, but this one said {message}")

    def _mourn(self, _launcher: object) -> None:
        logger.warning("sandbox: the launcher died; starting another")
        self._launcher = Helper("launcher", self._launcher_settings(self._settings()), self._ignore, self._mourn)
        self._starting = asyncio.get_running_loop().create_task(self._launcher.start())

    def _launcher_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**settings, "sources": self._sources, "command": self._fixed}

    async def _first_process(self, read: int) -> int:
        """What bubblewrap says about the process that it started. Raises ValueError when it says nothing."""
        os.set_blocking(read, False)
        loop, heard, told = asyncio.get_running_loop(), asyncio.Event(), b""
        loop.add_reader(read, heard.set)
        try:
            while True:
                await asyncio.wait_for(heard.wait(), _START_S)
                heard.clear()
                try:
                    piece = os.read(read, 4096)
                except BlockingIOError:
                    continue
                told += piece
                if not piece or b"}" in told:
                    return int(json.loads(told)["child-pid"])
        finally:
            loop.remove_reader(read)

    def _elsewhere(self, settings: Mapping[str, Any]) -> list[str]:
        exposed = settings["expose"]
        return [path for path in rootfs.WRITABLE_ELSEWHERE if not any(under(other, (path,)) for other in exposed)]

    def _arguments(self, settings: Mapping[str, Any]) -> list[str]:
        """What is the same for every job."""
        said = ["--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        said += ["--uid", str(rootfs.USER), "--gid", str(rootfs.USER), "--hostname", rootfs.NAME]
        for name, value in settings["environment"].items():
            said += ["--setenv", name, value]
        said += ["--perms", "1777", "--size", str(self._disk_mb << 20), "--tmpfs", "/tmp", "--proc", "/proc"]
        said += ["--dir", "/var", "--dir", "/in", "--dir", SESSION]
        for path in (*rootfs.system_directories(), *settings["expose"]):
            said += ["--ro-bind", self._bound(path), path]
        if os.path.isdir("/usr/src"):
            said += ["--tmpfs", "/usr/src", "--remount-ro", "/usr/src"]
        for name in rootfs.DEVICES:
            said += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for path, target in rootfs.links().items():
            said += ["--symlink", target, path]
        for path in self._elsewhere(settings):
            said += ["--symlink", rootfs.place(path), path]
        for name in rootfs.settings():
            said += ["--ro-bind", f"{STAGE}/{name}", f"/etc/{name}"]
        for name in ("__init__.py", "sandbox/__init__.py", "sandbox/jail"):
            said += ["--ro-bind", self._bound(str(_PACKAGE.parent / name)), f"{_CODE}/recipe/dag/{name}"]
        return said

    def _bound(self, path: str) -> str:
        """Where the launcher has `path`."""
        if path not in self._sources:
            self._sources.append(path)
        return staged(self._sources.index(path))

    def _granted(self, job: Mapping[str, Any]) -> list[str]:
        said, root = [], self._bound(str(self._root))
        if job["work"] is not None:
            said += ["--bind", f"{root}/{job['work']}", SESSION]
        for name, place in job["shares"].items():
            said += ["--ro-bind", f"{root}/{place}", f"/in/{name}"]
        return said

    def _plan(self, code: str, language: str, *rest: Any) -> tuple[str, list[dict[str, Any]]]:
        _, stages = super()._plan(code, language, *rest)
        if language == "python":
            stages = [{**stages[0], "argv": COLD_PYTHON}]
        return routing.COLD, stages
