"""Kill runs with a sandbox under load with SIGKILL, at random points; nothing of the sandbox may be left.

    python examples/kill_sandbox.py [--rounds 50] [--isolation full] [--isolation landlock]

Each round starts a process that uses a sandbox as a run does, in a folder of its own, sends jobs, sessions and hostile
programs, and kills that process, or first its server, at most a few seconds after the start. Then every process that
descends from it must end, and its sockets, control groups, mounts and files must disappear; the folder itself must keep
its mode. This process adopts orphans, so that none of them can hide. Prints what was left, with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp
from soak_sandbox import Soak, conclude, connect, control_groups, count_files, disturb, tree

from recipe.sandbox import descent
from recipe.sandbox.errors import CannotStart

PATIENCE_S = 15.0
"""How long what belongs to a killed server may take to end: its reaper waits for the jobs, then removes the files."""
LATEST_S = 6.0
"""When a run is killed at the latest, after its start, which takes up to half of that."""
MODE = 0o755
PR_SET_CHILD_SUBREAPER = 36
RUN = """
import asyncio, sys
from recipe.sandbox.errors import CannotStart
from recipe.sandbox.launch import LocalSandbox
local = LocalSandbox(isolation=sys.argv[1])
try:
    asyncio.run(local.start())
except CannotStart as error:
    sys.exit(str(error))
print(local.url, local.token, flush=True)
sys.stdin.read()
"""


def start(isolation: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process with a sandbox of its own in `folder`, which is its TMPDIR."""
    packages = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": packages}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, isolation],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


async def load(
    process: subprocess.Popen[str], concurrency: int, hostile: int, answers: Counter[str], wrong: list[str]
) -> None:
    """Send jobs, checked and hostile ones, until the server is gone. Counts the answers; adds a line for each wrong one
    to `wrong`."""
    assert process.stdout is not None  # a pipe
    url, _, token = (await asyncio.to_thread(process.stdout.readline)).strip().partition(" ")
    if not url:
        return
    # A killed server resets some connections and leaves others without an answer.
    with suppress(aiohttp.ClientError, OSError, ExceptionGroup):
        async with connect(url, token) as http:
            async with http.post("/sessions") as response:
                jobs = Soak(http, (await response.json())["id"])
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(hostile):
                        group.create_task(disturb(http, random.randrange(1 << 30) + number, asyncio.Event(), answers))
                    group.create_task(jobs.run(range(1 << 30), concurrency))
            finally:
                answers["checked"] += sum(jobs.counts.values())
                # A server that stops, since its run was killed, refuses jobs.
                wrong += [line for line in jobs.wrong if "'status': 'SandboxError'" not in line]


def sockets(pids: set[int]) -> set[str]:
    """Return the numbers of the sockets that these processes have open."""
    numbers = set()
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    kind, _, number = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
                    if kind == "socket":
                        numbers.add(number.strip("[]"))
    return numbers


def open_sockets() -> set[str]:
    """Return the numbers of all UNIX and TCP sockets of this network namespace."""
    numbers = set()
    for name, column in (("unix", 6), ("tcp", 9), ("tcp6", 9)):
        with suppress(OSError):
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            numbers.update(line.split()[column] for line in lines)
    return numbers


class Remains:
    """What belonged to a server at the moment before its death."""

    def __init__(self, server: int, folder: Path):
        self._folder = folder
        self._sockets = sockets(tree(server)) - sockets({os.getpid()})
        self._groups = control_groups(tree(server)) - control_groups({os.getpid()})

    def found(self) -> list[str]:
        """Return a line for each kind of thing that is left."""
        for child in descent.children(os.getpid()):
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        left = {
            "processes": descent.descendants(os.getpid()),
            "sockets": self._sockets & open_sockets(),
            "control groups": {group for group in self._groups if os.path.isdir(group)},
            "mounts": [
                line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self._folder) in line
            ],
            "files": [entry.name for entry in os.scandir(self._folder)],
        }
        lines = [f"{name}: {sorted(things)[:5]}" for name, things in left.items() if things]
        mode = self._folder.stat().st_mode & 0o7777
        if mode != MODE:
            lines.append(f"mode of the folder above: {mode:o} instead of {MODE:o}")
        return lines


async def kill_one(
    isolation: str, after_s: float, *, server_first: bool, concurrency: int, hostile: int, answers: Counter[str]
) -> list[str]:
    """Start a run, kill it after `after_s` and return a line for each wrong answer before and for each kind of thing
    that is left. Raises CannotStart if it ended by itself."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kill-") as name:
        folder = Path(name)
        folder.chmod(MODE)
        process = start(isolation, folder)
        sending = asyncio.create_task(load(process, concurrency, hostile, answers, wrong))
        await asyncio.sleep(after_s)
        if process.poll() is not None:
            raise CannotStart(f"the sandbox did not start: exit code {process.returncode}")
        remains = Remains(process.pid, folder)
        answers["processes"] += len(tree(process.pid))
        answers["files"] += count_files(folder)
        for child in descent.children(process.pid) if server_first else ():
            if b"recipe.sandbox.embedded" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        await asyncio.wait([sending])
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        deadline = time.monotonic() + PATIENCE_S
        while (left := remains.found()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return wrong + left


async def kill_many(
    isolation: str, rounds: int, concurrency: int, hostile: int, *, say: Callable[[str], None] = print
) -> list[str]:
    """Return a line for each thing that a round left, and for each wrong answer before."""
    # Orphans of the servers become children of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rng, wrong, answers = random.Random(rounds), [], Counter()
    for number in range(1, rounds + 1):
        after_s = rng.uniform(0.1, LATEST_S)
        left = await kill_one(
            isolation,
            after_s,
            server_first=number % 2 == 1,
            concurrency=concurrency,
            hostile=hostile,
            answers=answers,
        )
        wrong += [f"{isolation}, round {number}, killed after {after_s:.2f} s: {line}" for line in left]
        if number % 10 == 0 or number == rounds:
            say(f"{isolation}: {number} killed, {len(wrong)} remains or wrong answers; before that, {dict(answers)}")
    return wrong


async def run(arguments: argparse.Namespace) -> list[str]:
    wrong = []
    for isolation in arguments.isolation or ["full"]:
        wrong += await kill_many(isolation, arguments.rounds, arguments.concurrency, arguments.hostile)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="for each isolation")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--hostile", type=int, default=4, help="hostile programs at once")
    parser.add_argument("--isolation", action="append", choices=("full", "landlock"), help="repeatable (default: full)")
    conclude(run(parser.parse_args()), "nothing was left")


if __name__ == "__main__":
    main()
