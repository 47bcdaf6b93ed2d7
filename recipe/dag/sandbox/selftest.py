"""Does the sandbox work here, and does it hold?

Invariant: it starts the server that a run would start, by default with full isolation, and what it reports was tried:
two programs that must work, and attacks on the host that must not.
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

from recipe.dag.sandbox.launch import LocalSandbox
from recipe.dag.tools.sandbox_client import RunResult, SandboxClient

_PROGRAMS = {"print": ("print(1 + 1)", "2"), "numpy": ("import numpy; print(int(numpy.arange(5).sum()))", "10")}


@dataclass
class Report:
    """`problems` is empty when programs work and attacks fail."""

    isolation: str = ""
    engine: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        return (
            f"isolation {self.isolation} (engine {self.engine}): print(1+1) printed 2 in {self.seconds:.2f} s; reading "
            "a file of the host, listing its processes and connecting to it failed, as they must"
        )


async def run() -> Report:
    """Raises UserError where the sandbox does not start at all."""
    local = LocalSandbox(max_concurrent=2)
    report, client = Report(), None
    try:
        client = SandboxClient(await local.start(), token=local.token, retries=0)
        report.isolation, report.engine = local.isolation, local.engine
        for name, (code, expected) in _PROGRAMS.items():
            if name == "numpy" and find_spec("numpy") is None:
                continue
            result = await client.run_code(code)
            if result.status != "success" or result.stdout.strip() != expected:
                report.problems.append(f"{name}: {_told(result)}")
            if name == "print":
                report.seconds = result.seconds
        with _bait() as attacks:
            for name, code in attacks.items():
                result = await client.run_code(code, timeout_s=10)
                if result.stdout.strip() != "held":
                    report.problems.append(f"{name}: the sandbox does not hold ({_told(result)})")
    finally:
        if client is not None:
            await client.close()
        await local.stop()
    return report


@contextmanager
def _bait() -> Iterator[dict[str, str]]:
    """Attacks that print `held` where they fail, and for their time what they are after: a file of this user, a
    process, a port on this machine."""
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
        found = f"[path for path in glob.glob('/proc/[0-9]*/cmdline') if {number!r} in open(path).read()]"
        try:
            yield {
                "host file": _attempt(f"open({str(file)!r}).read()"),
                "host process": _attempt(f"{found}[0]"),
                "network": _attempt(f"socket.create_connection({listener.getsockname()!r}, 3)"),
            }
        finally:
            process.kill()


def _attempt(expression: str) -> str:
    failed = "except (OSError, IndexError):\n    print('held')"
    return f"import glob, socket\ntry:\n    {expression}\n{failed}\nelse:\n    print('got in')\n"


def _told(result: RunResult) -> str:
    return f"{result.status}: {result.stdout[-200:]!r} {result.stderr[-200:]!r}"
