"""Runs an engine in another process: as another user, or as in a container without user namespaces.

`python elsewhere.py ROOT ISOLATION NAMESPACES` reads one job per line from stdin, as JSON, and writes its outcome.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
NOBODY: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
_NUMBERS = {"x86_64": (272, 56), "aarch64": (97, 220)}


def forbid_namespaces() -> None:
    """Refuse unshare, and clone with namespaces, as the default profiles of container runtimes do."""
    unshare, clone = _NUMBERS[os.uname().machine]
    load, equal, any_bit, answer = 0x20, 0x15, 0x45, 0x06
    code = [
        (load, 0, 0, 0), (equal, 4, 0, unshare), (equal, 0, 2, clone), (load, 0, 0, 16), (any_bit, 1, 0, 0x7E020000),
        (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050001),
    ]  # fmt: skip
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    text = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *values in ((38, 1, 0, 0, 0), (22, 2, header)):
        if libc.prctl(option, *values) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}")


def python_for_all() -> str | None:
    """Return an interpreter that every user can run, of this version; None without one."""
    code = f"import sys, recipe.sandbox.engines; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    nobody = NOBODY if os.geteuid() == 0 else {}
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            tried = subprocess.run([python, "-c", code], cwd="/", env=_environment(), capture_output=True, **nobody)
        except OSError:
            continue
        if tried.returncode == 0:
            return python
    return None


def python_for_landlock() -> str:
    """Return that interpreter where Landlock can be tested; skip the test elsewhere."""
    import pytest

    from recipe.sandbox.jail import landlock

    python = python_for_all()
    if os.geteuid() != 0 or not landlock.version() or python is None:
        pytest.skip("needs root, Landlock, and an interpreter that every user can run")
    return python


def _environment() -> dict[str, str]:
    packages = [path for path in sys.path if path.endswith("-packages")]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *packages])}


class Elsewhere:
    """An engine in another process; `isolation` is what it chose. Raises RuntimeError if it cannot start.

    namespaces: whether they are allowed. options: of subprocess.Popen.
    """

    def __init__(self, root: Path, isolation: str, python: str, *, namespaces: bool = False, **options: Any):
        self._process = subprocess.Popen(
            [python, __file__, str(root), isolation, str(int(namespaces))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(), cwd="/", **options,
        )  # fmt: skip
        hello = self._read()
        if "isolation" not in hello:
            raise RuntimeError(hello["unavailable"])
        self.isolation = hello["isolation"]
        self.pid = self._process.pid

    def run(self, code: str, **fields: Any) -> Any:
        """Return the outcome's fields as attributes: `run`, `compile`, `files`, or `error`."""
        assert self._process.stdin is not None
        print(
            json.dumps({"code": code, "timeout_s": 60, "compile_timeout_s": 60, **fields}),
            file=self._process.stdin,
            flush=True,
        )
        return json.loads(self._process.stdout.readline(), object_hook=lambda fields: _Attributes(fields))

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.communicate()


class _Attributes(dict):
    __getattr__ = dict.__getitem__


async def main(root: str, isolation: str) -> None:
    from recipe.sandbox import engines
    from recipe.sandbox.job import Job
    from recipe.sandbox.limits import Limits
    from recipe.sandbox.outcome import SandboxError, Unavailable

    try:
        engine = await engines.start(isolation, True, root=Path(root))
    except Unavailable as error:
        print(json.dumps({"unavailable": str(error)}), flush=True)
        return
    print(json.dumps({"isolation": engine.isolation}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        fields = json.loads(line)
        limits = Limits(**fields.pop("limits", {}))
        try:
            answer: Any = dataclasses.asdict(await engine.execute(Job(**fields, limits=limits)))
        except SandboxError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    await engine.close()


if __name__ == "__main__":
    if not int(sys.argv[3]):
        forbid_namespaces()
    asyncio.run(main(sys.argv[1], sys.argv[2]))
