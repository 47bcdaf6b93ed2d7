"""Checks that the sandbox works on this machine and withstands attacks.

Invariant: it starts the server that a run would start, and everything that it reports was tried:
two programs that must succeed, and attacks on the host that must fail.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

from recipe.sandbox.launch import LocalSandbox

_PROGRAMS = {"print": ("print(1 + 1)", "2"), "numpy": ("import numpy; print(int(numpy.arange(5).sum()))", "10")}


@dataclass
class Report:
    """`problems` is empty if the programs work and the attacks fail."""

    isolation: str = ""
    memory: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        return (
            f"isolation {self.isolation}, memory by {self.memory}: print(1+1) printed 2 in {self.seconds:.2f} s; "
            "reading a file of the host, listing its processes and connecting to it failed, as they must"
        )


async def run() -> Report:
    """Start a sandbox and test it. Raises CannotStart."""
    local, report = LocalSandbox(max_concurrent=2), Report()
    await local.start()
    report.isolation, report.memory = local.isolation, local.memory
    headers = {"Authorization": f"Bearer {local.token}"}
    try:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(local.socket), headers=headers) as http:
            for name, (code, expected) in _PROGRAMS.items():
                if name == "numpy" and find_spec("numpy") is None:
                    continue
                answer = await _run_code(http, code)
                if answer["status"] != "Success" or answer["run_result"]["stdout"].strip() != expected:
                    report.problems.append(f"{name}: {_describe(answer)}")
                elif name == "print":
                    report.seconds = answer["run_result"]["execution_time"]
            with _bait() as attacks:
                for name, code in attacks.items():
                    answer = await _run_code(http, code)
                    if answer["run_result"] is None or answer["run_result"]["stdout"].strip() != "held":
                        report.problems.append(f"{name}: the sandbox does not stop this attack ({_describe(answer)})")
    finally:
        await local.stop()
    return report


async def _run_code(http: aiohttp.ClientSession, code: str) -> dict[str, Any]:
    request = {"code": code, "language": "python", "run_timeout": 20}
    async with http.post("http://localhost/run_code", json=request) as answer:
        answer.raise_for_status()
        return await answer.json()


@contextmanager
def _bait() -> Iterator[dict[str, str]]:
    """Yield attacks, which print `held` if they fail. Their targets exist for that time: a file of this user, a process
    and a port of this machine."""
    number = str(secrets.randbelow(10**12))
    with (
        tempfile.TemporaryDirectory(prefix="verl-dag-bait-") as folder,
        socket.socket() as listener,
        subprocess.Popen(["sleep", f"600.{number}"]) as process,
    ):
        file = Path(folder) / "secret"
        file.write_text(number)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        matches = f"[path for path in glob.glob('/proc/[0-9]*/cmdline') if {number!r} in open(path).read()]"
        try:
            yield {
                "host file": _attempt(f"open({str(file)!r}).read()"),
                "host process": _attempt(f"{matches}[0]"),
                "network": _attempt(f"socket.create_connection({listener.getsockname()!r}, 3)"),
            }
        finally:
            process.kill()


def _attempt(expression: str) -> str:
    failed = "except (OSError, IndexError):\n    print('held')"
    return f"import glob, socket\ntry:\n    {expression}\n{failed}\nelse:\n    print('got in')\n"


def _describe(answer: dict[str, Any]) -> str:
    run = answer["run_result"] or {"stdout": "", "stderr": answer["message"]}
    return f"{answer['status']}: {run['stdout'][-200:]!r} {run['stderr'][-200:]!r}"
