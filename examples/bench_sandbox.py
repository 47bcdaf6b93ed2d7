"""Programs per second in the sandbox, compared with bare subprocesses, and other servers, on the same machine.

    python examples/bench_sandbox.py [--quick] [--workload print] [--concurrency 8] [--isolation full] [--against URL]

Every answer is checked. The baseline starts one `python -I -c PROGRAM` per call, without server, isolation, limits, and
the start-up hooks of this environment's packages. Client, servers and programs share the cores; everything that is
compared is measured in turns for each line of the table. Without --url, the sandbox is started as in a run; landlock
needs an interpreter that all users can reach. --against is a server with SandboxFusion's API.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
import venv
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from soak_sandbox import connect

from recipe.sandbox import engines
from recipe.sandbox.errors import CannotStart
from recipe.sandbox.launch import LocalSandbox

MEGABYTE = 1 << 20
KEPT_BYTES = MEGABYTE
"""Size to which the server truncates each output stream."""


@dataclass(frozen=True)
class Workload:
    """A program and its expected output, which the server truncates to KEPT_BYTES."""

    code: str
    expected: str
    stdin: str | None = None


PRINT = Workload("print(1 + 1)", "2\n")
SLEEPER = Workload("import time; time.sleep(1); print('awake')", "awake\n")
SCIENCE = "import numpy, sympy; x = sympy.Symbol('x'); print(sympy.factor(x**2 - numpy.arange(3).sum() * x + 2))"
WORKLOADS = {
    "print": PRINT,
    "numpy+sympy": Workload(SCIENCE, "(x - 2)*(x - 1)\n"),
    "1 MB stdin": Workload("import sys; print(len(sys.stdin.read()))", f"{MEGABYTE}\n", "x" * MEGABYTE),
    "5 MB output": Workload("print('y' * 5_000_000)", "y" * 5_000_000 + "\n"),
    "print, 1 % sleepers": PRINT,
}
SLEEPERS = "print, 1 % sleepers"
Call = Callable[[Workload], Awaitable[str]]
BARE, AGAINST = "bare", "against"
TURNS = 2


@dataclass
class Measurement:
    """Latencies, in seconds, of the short calls; sleepers are left out."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def measure(call: Call, name: str, concurrency: int, seconds: float, measurement: Measurement) -> None:
    """Add `seconds` of `concurrency` callers, each with one call at a time. Raises SystemExit for a wrong answer."""
    numbers = itertools.count(1)
    began = time.perf_counter()
    end = began + seconds

    async def caller() -> None:
        while time.perf_counter() < end:
            slow = name == SLEEPERS and next(numbers) % 100 == 0
            workload = SLEEPER if slow else WORKLOADS[name]
            started = time.perf_counter()
            answer = await call(workload)
            if answer not in (workload.expected, workload.expected[:KEPT_BYTES]):
                raise SystemExit(f"{name}: wrong answer {answer[:200]!r}")
            if not slow:
                measurement.latencies.append(time.perf_counter() - started)

    await asyncio.gather(*(caller() for _ in range(concurrency)))
    measurement.seconds += time.perf_counter() - began


async def compare(calls: dict[str, Call], name: str, concurrency: int, seconds: float) -> dict[str, Measurement]:
    """Measure all in turns, TURNS times, so that what else the machine does meets each of them."""
    measurements = {label: Measurement() for label in calls}
    for _ in range(TURNS):
        for label, call in calls.items():
            await measure(call, name, concurrency, seconds / TURNS, measurements[label])
    return measurements


def lean_interpreter(folder: str) -> str:
    """Create an environment with this one's Python and packages but without their start-up hooks; return its Python.

    The hook of an editable installation alone makes each start two to three times slower, which would skew the ratio.
    """
    venv.create(folder, symlinks=True)
    packages = Path(folder, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    (packages / "packages.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    return str(Path(folder, "bin", "python"))


def bare(python: str) -> Call:
    """Return the baseline: a fresh interpreter per call."""

    async def call(workload: Workload) -> str:
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            python, "-I", "-c", workload.code, stdin=pipe if workload.stdin else none, stdout=pipe
        )
        stdout, _ = await process.communicate(workload.stdin.encode() if workload.stdin else None)
        return stdout.decode()

    return call


def over_http(session: aiohttp.ClientSession) -> Call:
    """Return calls to a server."""

    async def call(workload: Workload) -> str:
        body = {"code": workload.code, "language": "python", "stdin": workload.stdin, "run_timeout": 60}
        async with session.post("/run_code", json=body | {"compile_timeout": 60}) as response:
            if response.status != 200:
                raise SystemExit(f"HTTP {response.status}: {(await response.text())[:200]}")
            answer = await response.json()
        if answer["status"] != "Success":
            raise SystemExit(f"{answer['status']}: {answer['message'][-300:]} {str(answer['run_result'])[:300]}")
        return answer["run_result"]["stdout"]

    return call


async def reach(stack: AsyncExitStack, url: str, token: str | None = None) -> tuple[str, Call]:
    """Return the isolation of a server, or "unknown", and calls to it, until the stack is closed."""
    session = await stack.enter_async_context(connect(url, token))
    async with session.get("/v1/ping") as response:
        return response.headers.get("X-Sandbox-Isolation", "unknown"), over_http(session)


async def servers(stack: AsyncExitStack, arguments: argparse.Namespace) -> dict[str, Call]:
    """Return calls to each server by its name. Starts those that do not run; they end with the stack."""
    calls: dict[str, Call] = {}
    if arguments.url:
        isolation, call = await reach(stack, arguments.url)
        calls[isolation] = call
    for isolation in () if arguments.url else arguments.isolation:
        local = LocalSandbox(arguments.max_concurrent, isolation=isolation, accept_unsandboxed=isolation == "rlimits")
        await local.start()
        stack.push_async_callback(local.stop)
        isolation, call = await reach(stack, local.url, local.token)
        calls[isolation] = call
    if arguments.against:
        calls[AGAINST] = (await reach(stack, arguments.against))[1]
    return calls


async def run(arguments: argparse.Namespace, python: str) -> None:
    async with AsyncExitStack() as stack:
        calls = await servers(stack, arguments) | {BARE: bare(python)}
        cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
        print(f"isolation {', '.join(list(calls)[:-1])}, {cores} cores, load {load:.1f} before", end=", ")
        print(f"{arguments.seconds:g} s per line in {TURNS} turns")
        heads = ["calls/s", "p50 ms", "p99 ms", f"to {BARE}", *([f"to {AGAINST}"] if arguments.against else [])]
        print(f"{'workload':<21}{'at once':>8}  {'server':<10}" + "".join(f"{head:>13}" for head in heads))
        for concurrency in arguments.concurrency:
            for name in arguments.workload:
                for call in calls.values():  # warm up
                    await asyncio.gather(*(call(WORKLOADS[name]) for _ in range(concurrency)))
                measured = await compare(calls, name, concurrency, arguments.seconds)
                for label, of in measured.items():
                    cells = [f"{of.rate:.1f}", f"{of.quantile(0.5) * 1e3:.1f}", f"{of.quantile(0.99) * 1e3:.1f}"]
                    for other in (BARE, AGAINST) if arguments.against else (BARE,):
                        cells.append(f"{of.rate / measured[other].rate:.2f}x" if label != other else "")
                    text = "".join(f"{cell:>13}" for cell in cells).rstrip()
                    print(f"{name:<21}{concurrency:>8}  {label:<10}{text}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="one second per line, at 1 and 8")
    parser.add_argument("--seconds", type=float, help="per line (default: 5, with --quick 1)")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only this; repeatable")
    parser.add_argument("--concurrency", action="append", type=int, help="callers (default: 1, 8, 32 and 128)")
    parser.add_argument("--url", help="a running server, as it prints its URL, instead of one that is started")
    parser.add_argument("--against", metavar="URL", help="another running server to compare with")
    parser.add_argument(
        "--isolation", action="append", choices=engines.ISOLATIONS, help="repeatable, side by side (default: auto)"
    )
    parser.add_argument("--max-concurrent", type=int, help="programs at once in the server (default: the server's)")
    arguments = parser.parse_args(argv)
    arguments.isolation = arguments.isolation or ["auto"]
    arguments.workload = arguments.workload or list(WORKLOADS)
    arguments.concurrency = arguments.concurrency or ([1, 8] if arguments.quick else [1, 8, 32, 128])
    arguments.seconds = arguments.seconds or (1.0 if arguments.quick else 5.0)
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(run(arguments, lean_interpreter(folder)))
        except CannotStart as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
