"""The bubblewrap engine: each job in a jail that bubblewrap makes, with a fresh interpreter.

Invariant: bubblewrap alone makes the namespaces and loads the filter; what goes on inside, limits, files and stages, is
the same supervisor's. So one engine can be held against the other. Slower, and nothing is warm.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.dag.sandbox.jail import protocol, rootfs, routing, seccomp
from recipe.dag.sandbox.jail.engine import JailEngine
from recipe.dag.sandbox.jail.exposure import under
from recipe.dag.sandbox.jail.handle import Jail
from recipe.dag.sandbox.jail.probe import explain
from recipe.dag.sandbox.outcome import SandboxError, Unavailable

_CODE = "/.code"
"""Where the supervisor's own modules are, inside."""
_PACKAGE = Path(__file__).resolve().parents[1]
_STARTER = f"""
import os, sys
sys.path[0] = {_CODE!r}
from recipe.dag.sandbox.jail.bwrapped import main
main(int(sys.argv[1]))
"""
_START_S = 10.0


class BwrapEngine(JailEngine):
    """Inodes are not capped, since bubblewrap cannot. For root, processes are watched, not limited by the kernel."""

    name = "bwrap"

    def __init__(self, root: Path, *, disk_mb: int = 256):
        super().__init__(root, disk_mb=disk_mb)
        self.counts_processes = os.geteuid() == 0
        self._program = ""
        self._fixed: list[str] = []
        self._told: dict[str, Any] = {}
        self._own: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise Unavailable("engine 'bwrap' needs bubblewrap: install the package bubblewrap (apt, dnf, pacman)")
        self._program = program
        settings = self._settings()
        self._own = tempfile.TemporaryDirectory(prefix="verl-dag-bwrap-")
        for name, content in {**rootfs.SETTINGS, **rootfs.copied_settings()}.items():
            Path(self._own.name, name).write_bytes(content.encode() if isinstance(content, str) else content)
        os.chmod(self._own.name, 0o755)
        self._fixed = self._arguments(settings)
        places = [rootfs.place(path) for path in self._elsewhere(settings)]
        self._told = {"environment": settings["environment"], "foreign": [], "places": places}
        await super().start()
        try:
            # Generous: the first start of an interpreter reads it from the disk.
            tried = await self.execute("print(1)", timeout_s=60.0)
        except SandboxError as error:
            await self.close()
            raise Unavailable(explain("bubblewrap", str(error), None)) from error
        if tried.run is None or tried.run.stdout != "1\n":
            await self.close()
            raise Unavailable(explain("bubblewrap", f"a first program answered {tried.run}", None))

    async def close(self) -> None:
        await super().close()
        if self._own is not None:
            self._own.cleanup()

    async def _take(self, kind: str, job: Mapping[str, Any]) -> Jail:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe2(os.O_CLOEXEC)
        rules = os.memfd_create("seccomp", os.MFD_CLOEXEC)
        try:
            os.write(rules, seccomp.program())
            os.lseek(rules, 0, os.SEEK_SET)
            command = [self._program, *self._fixed, *self._granted(job)]
            command += ["--info-fd", str(write), "--seccomp", str(rules), "--remount-ro", "/"]
            command += ["--", sys.executable, "-c", _STARTER, str(theirs.fileno())]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={},
                pass_fds=[write, rules, theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(read)
            raise
        finally:
            theirs.close()
            os.close(write)
            os.close(rules)

        def reap() -> None:
            process.kill()
            process.wait()
            process.stderr.close()

        try:
            first = await self._first_process(read)
            descriptor = os.pidfd_open(first)
        except BaseException as error:
            ours.close()
            process.kill()
            words = process.stderr.read().decode("utf-8", "replace").strip()
            reap()
            if isinstance(error, ValueError | OSError | TimeoutError):
                raise SandboxError(f"bubblewrap: {words or error}") from error
            raise
        finally:
            os.close(read)
        jail = Jail(ours, descriptor, reap)
        protocol.send(ours, self._told)
        return jail

    async def _first_process(self, read: int) -> int:
        """What bubblewrap says about the process that it started. Raises ValueError when it says nothing."""
        os.set_blocking(read, False)
        loop, heard, told = asyncio.get_running_loop(), asyncio.Event(), b""
        loop.add_reader(read, heard.set)
        try:
            while True:
                await asyncio.wait_for(heard.wait(), _START_S)
                heard.clear()
                piece = os.read(read, 4096)
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
        said += ["--dir", "/var", "--dir", "/in", "--dir", "/work"]
        for path in (*rootfs.system_directories(), *settings["expose"]):
            said += ["--ro-bind", path, path]
        if os.path.isdir("/usr/src"):
            said += ["--tmpfs", "/usr/src", "--remount-ro", "/usr/src"]
        for name in rootfs.DEVICES:
            said += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for path, target in rootfs.links().items():
            said += ["--symlink", target, path]
        for path in self._elsewhere(settings):
            said += ["--symlink", rootfs.place(path), path]
        for name in os.listdir(self._own.name):
            said += ["--ro-bind", f"{self._own.name}/{name}", f"/etc/{name}"]
        for name in ("__init__.py", "sandbox/__init__.py", "sandbox/jail"):
            said += ["--ro-bind", str(_PACKAGE.parent / name), f"{_CODE}/recipe/dag/{name}"]
        return said

    def _granted(self, job: Mapping[str, Any]) -> list[str]:
        said = []
        if job["work"] is not None:
            said += ["--bind", str(self._root / job["work"]), "/work"]
        for name, place in job["shares"].items():
            said += ["--ro-bind", str(self._root / place), f"/in/{name}"]
        return said

    def _plan(self, code: str, language: str, *rest: Any) -> tuple[str, list[dict[str, Any]]]:
        _, stages = super()._plan(code, language, *rest)
        if language == "python":
            stages = [{**stages[0], "argv": [sys.executable, "-u", "{}"]}]
        return routing.COLD, stages
