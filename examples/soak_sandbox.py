"""Run thousands of different programs in the sandbox; every answer must be right, and nothing may grow.

    python examples/soak_sandbox.py [--jobs 10000] [--concurrency 32] [--hostile 4] [--isolation landlock]

The jobs print, compute, read, write, fail, time out, flood, leave daemons behind and use sessions. Each has a different
answer, so that output in the wrong job is detected. Meanwhile hostile programs exhaust what they can; their own answers
are not checked. After a fifth of the jobs and at the end, the processes, descriptors, mounts, control groups, memory
and files of the server are counted, as well as the memory of this process, which stands for the trainer, and the
machine's. Prints what was wrong or grew, with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from recipe.dag.core.http import http_root, open_http
from recipe.dag.tools.sandbox_transport import split
from recipe.sandbox import descent, engines
from recipe.sandbox.errors import CannotStart
from recipe.sandbox.launch import LocalSandbox

Check = Callable[[dict[str, Any]], bool]
"""Returns whether an answer is right."""
SETTLE_S, STILL_S = 20.0, 2.0
MEMORY_SLACK_MB, MACHINE_SLACK_MB = 64, 512
SLACK = {
    **{"memory_mb": MEMORY_SLACK_MB, "trainer_mb": MEMORY_SLACK_MB},
    **{"machine_mb": MACHINE_SLACK_MB, "shared_mb": MACHINE_SLACK_MB},
}
WEIGHTS = {
    **{"print": 30, "numpy": 15, "sympy": 5, "stdin": 10, "error": 10, "exit": 5, "signal": 3, "timeout": 1},
    **{"flood": 2, "memory": 2, "daemon": 5, "files": 8, "session": 5, "bash": 3, "cpp": 0.2},
}
CPP = '#include <cstdio>\nint main() { printf("%%d\\n", %d); }'
DAEMON = "import os\nif os.fork() == 0:\n os.setsid()\n os.execlp('sleep', 'sleep', '99')\nprint({})"
IN_SESSION = "import os; open('{0}', 'w').write('{0}'); print(open('{0}').read()); os.unlink('{0}')"


HOSTILE = {
    "pipes": """
for _ in range(12):
    if os.fork() == 0: break
pipes = [os.pipe() for _ in range(110)]
for _, end in pipes: os.write(end, bytes(4096))
time.sleep(9)""",
    "sockets": """
for _ in range(12):
    if os.fork() == 0: break
pairs = [socket.socketpair() for _ in range(100)]
for end, _ in pairs:
    end.setblocking(False)
    with contextlib.suppress(OSError):
        while True: end.send(bytes(65536))
time.sleep(9)""",
    "processes": """
for _ in range(200):
    with contextlib.suppress(OSError):
        if os.fork() == 0: time.sleep(9)
time.sleep(9)""",
    "spin": """
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        while True: pass
while True: pass""",
    "disk": """
for n in range(300): open(f"{n}", "wb").write(bytes(1 << 20))""",
    "inodes": """
for n in range(30_000): open(f"{n}", "w").close()""",
    "unlinked": """
for n in range(40):
    file = os.open("file", os.O_CREAT | os.O_WRONLY)
    os.unlink("file")
    os.write(file, bytes(16 << 20))""",
    "output": """
while True:
    sys.stdout.write("x" * 65536)
    sys.stderr.write("y" * 65536)""",
    "shared memory": """
for _ in range(3):
    if os.fork() == 0: break
held = [mmap.mmap(-1, 100 << 20) for _ in range(2)]
for piece in held:
    piece.write(bytes(100 << 20))
    piece.madvise(mmap.MADV_DONTNEED)
time.sleep(9)""",
    "signals": """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
for _ in range(200_000):
    if ctypes.CDLL(None).sigqueue(os.getpid(), signal.SIGRTMIN, None): break
os.kill(os.getpid(), signal.SIGXCPU)""",
    "mode": "os.chmod('.', 0)",
    "removal": "shutil.rmtree(os.getcwd())",
    "nesting": """
for _ in range(1000):
    os.mkdir("d")
    os.chdir("d")""",
    "daemons": """
if os.fork() == 0:
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    for _ in range(10):
        if os.fork() == 0: break
    os.closerange(0, 256)
    time.sleep(99)""",
}
"""Programs that take all that they are granted, each bounded, in case nothing else bounds it."""
IMPORTS = "import contextlib, ctypes, mmap, os, shutil, signal, socket, sys, time"


def connect(url: str, token: str | None = None) -> aiohttp.ClientSession:
    """Return a session for requests by path to the server at `url`, as it prints it. token: None: the one in `url`."""
    root, given = split(url)
    headers = {"Authorization": f"Bearer {token or given}"} if token or given else {}
    return open_http(root, base_url=http_root(root), headers=headers, timeout=aiohttp.ClientTimeout(total=300))


async def disturb(http: aiohttp.ClientSession, number: int, stop: asyncio.Event, outcomes: Counter[str]) -> None:
    """Run hostile programs one after the other, every second in a session of its own, until `stop` is set. Counts the
    status of the answers in `outcomes`. Raises aiohttp.ClientError when the server is gone."""
    rng = random.Random(number)
    headers = {"X-Client-Id": f"hostile {number}"}
    while not stop.is_set():
        program = f"{IMPORTS}\n{HOSTILE[rng.choice(list(HOSTILE))]}"
        body = {"code": program, "language": "python", "run_timeout": 2, "fetch_files": ["**/*.png", "[0]"]}
        session = ""
        if rng.random() < 0.5:
            async with http.post("/sessions", headers=headers) as response:
                session = (await response.json()).get("id", "")  # none while the server is full
            body |= {"session_id": session} if session else {}
        async with http.post("/run_code", json=body, headers=headers) as response:
            answer = await response.json()
            outcomes[answer["status"] if response.ok else f"HTTP {response.status}"] += 1
            if answer.get("status") == "SandboxError":
                outcomes[answer["message"][-150:]] += 1
        if session:
            async with http.delete(f"/sessions/{session}", headers=headers) as response:
                outcomes["not removed"] += not response.ok


def prints(text: object) -> Check:
    return lambda answer: answer["status"] == "Success" and answer["run_result"]["stdout"] == f"{text}\n"


def fails(code: int | None, stdout: str = "", stderr: str = "") -> Check:
    def check(answer: dict[str, Any]) -> bool:
        run = answer["run_result"]
        return (run["return_code"], run["stdout"]) == (code, stdout) and stderr in run["stderr"]

    return check


def make_job(kind: str, n: int, session: str) -> tuple[dict[str, Any], Check]:
    """Return the fields of a request and the check of its answer, which is different for each `n`."""
    content = base64.b64encode(str(n).encode()).decode()
    total = sum(range(n % 1000)) + n
    jobs: dict[str, tuple[dict[str, Any], Check]] = {
        "print": ({"code": f"print({n} * 7)"}, prints(n * 7)),
        "numpy": ({"code": f"import numpy; print(int(numpy.arange({n % 1000}).sum()) + {n})"}, prints(total)),
        "sympy": ({"code": f"import sympy; print(sympy.Poly('(x + {n})**2').coeffs()[1])"}, prints(2 * n)),
        "stdin": ({"code": "print(input()[::-1])", "stdin": f"{n}" * 100}, prints((f"{n}" * 100)[::-1])),
        "error": ({"code": f"raise ValueError({n})"}, fails(1, stderr=f"ValueError: {n}\n")),
        "exit": ({"code": f"import os; os._exit({n % 200 + 1})"}, fails(n % 200 + 1)),
        "signal": ({"code": "import os; os.kill(os.getpid(), 9)"}, fails(-9)),
        "timeout": ({"code": f"print({n}, flush=True)\nwhile True: pass", "run_timeout": 4}, fails(None, f"{n}\n")),
        "flood": (
            {"code": f"print('{n % 10}' * 3_000_000)"},
            lambda answer: answer["run_result"]["stdout"] == f"{n % 10}" * (1 << 20),
        ),
        "memory": (
            {"code": "x = bytearray(900 << 20); print(len(x))", "memory_limit_MB": 256},
            lambda answer: answer["run_result"]["return_code"] in (1, -9),
        ),
        "daemon": ({"code": DAEMON.format(n)}, prints(n)),
        "files": (
            {"code": "open('out', 'w').write(open('in').read())", "files": {"in": content}, "fetch_files": ["out"]},
            lambda answer: answer["files"] == {"out": content},
        ),
        "session": ({"code": IN_SESSION.format(n), "session_id": session}, prints(n)),
        "bash": ({"code": f"echo $(({n} + 1))", "language": "bash"}, prints(n + 1)),
        "cpp": ({"code": CPP % n, "language": "cpp"}, prints(n)),
    }
    return jobs[kind]


@dataclass(frozen=True)
class Census:
    """Resources of the server, its descendants and its directory; memory of this process and of the machine."""

    processes: int = 0
    descriptors: int = 0
    mounts: int = 0
    control_groups: int = 0
    files: int = 0
    memory_mb: int = 0
    trainer_mb: int = 0
    machine_mb: int = 0
    shared_mb: int = 0

    def growth(self, later: Census, *, shared_machine: bool = False) -> list[str]:
        """Return a line for each resource that grew, memory by more than SLACK. shared_machine: leave the machine's
        memory out, since other programs use it, too."""
        ignored = {"machine_mb": math.inf, "shared_mb": math.inf} if shared_machine else {}
        slack, after, lines = SLACK | ignored, asdict(later), []
        for name, before in asdict(self).items():
            if after[name] > before + slack.get(name, 0):
                lines.append(f"{name}: {before} -> {after[name]}")
        return lines


def tree(pid: int) -> set[int]:
    """Return a process with its descendants."""
    return {pid} | descent.descendants(pid)


def control_groups(pids: set[int]) -> set[str]:
    """Return the directories of the control groups that contain one of the processes, other than the root, which a
    process that has ended counts for."""
    groups = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if path != "/":
                    groups.add(os.path.normpath(f"/sys/fs/cgroup/{controllers.removeprefix('name=')}/{path}"))
    return groups


def pss_mb(pid: int) -> float:
    """Return the memory of a process, shared pages in proportion, in MiB. Raises OSError."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def meminfo_mb() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) // 1024 for fields in lines}


def count_files(root: Path) -> int:
    """Count the entries below `root`, however deeply nested."""
    todo, count = [str(root)], 0
    while todo:
        with suppress(OSError):
            entries = list(os.scandir(todo.pop()))
            count += len(entries)
            todo += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return count


def census(server: int, root: Path) -> Census:
    """Count the resources of process `server`, its descendants and the directory `root`."""
    pids, descriptors, mounts, memory = tree(server), 0, 0, 0.0
    for pid in pids:
        with suppress(OSError):
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
            mounts += len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
            memory += pss_mb(pid)
    machine = meminfo_mb()
    return Census(
        processes=len(pids),
        descriptors=descriptors,
        mounts=mounts,
        control_groups=len(control_groups(pids)),
        files=count_files(root),
        memory_mb=int(memory),
        trainer_mb=int(pss_mb(os.getpid())),
        machine_mb=machine["MemTotal"] - machine["MemAvailable"],
        shared_mb=machine["Shmem"],
    )


async def settled(local: LocalSandbox, before: Census | None = None, *, shared_machine: bool = False) -> Census:
    """Return a census that, apart from memory, did not change for STILL_S, in which finished jobs disappear and idle
    interpreters are forked. With `before`, also wait until nothing has grown. Gives up after SETTLE_S."""
    no_memory = dict.fromkeys(SLACK, 0)
    deadline = time.monotonic() + SETTLE_S
    last, since = census(local.pid, local.root), time.monotonic()
    while time.monotonic() < deadline:
        await asyncio.sleep(0.25)
        now = census(local.pid, local.root)
        if replace(now, **no_memory) != replace(last, **no_memory):
            since = time.monotonic()
        last = now
        if time.monotonic() - since > STILL_S and not (before and before.growth(now, shared_machine=shared_machine)):
            break
    return last


class Soak:
    """Runs checked jobs. `wrong` has a line for each wrong answer."""

    def __init__(self, http: aiohttp.ClientSession, session: str):
        self._http = http
        self._session = session
        self._rng = random.Random(0)
        self._kinds = {kind: weight for kind, weight in WEIGHTS.items() if kind != "cpp" or shutil.which("g++")}
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()

    async def run(self, numbers: range, concurrency: int) -> None:
        """Run the jobs with these numbers, `concurrency` at a time."""
        queue = iter(numbers)  # shared by the workers

        async def worker() -> None:
            for n in queue:
                await self._run_job(n)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def _run_job(self, n: int) -> None:
        kind = self._rng.choices(list(self._kinds), list(self._kinds.values()))[0]
        fields, is_right = make_job(kind, n, self._session)
        # long time-outs and repetitions: speed is not tested here
        body = {"language": "python", "run_timeout": 60, "compile_timeout": 60} | fields
        self.counts[kind] += 1
        answer: dict[str, Any] = {}
        for _ in range(20):
            async with self._http.post("/run_code", json=body) as response:
                answer = await response.json()
                if response.status != 504:
                    break
        with suppress(TypeError, KeyError):  # of an answer with missing fields
            if is_right(answer):
                return
        self.wrong.append(f"{kind} {n}: {str(answer)[:500]}")


async def soak(
    local: LocalSandbox,
    jobs: int,
    concurrency: int,
    *,
    hostile: int = 0,
    shared_machine: bool = False,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Run the jobs beside `hostile` neighbours and return a line for each wrong answer and each resource that grew."""
    outcomes: Counter[str] = Counter()
    async with connect(local.url, local.token) as http, connect(local.url, local.token) as others:
        async with http.post("/sessions") as response:
            checked = Soak(http, (await response.json())["id"])

        async def run(numbers: range) -> None:
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for number in range(hostile):
                    group.create_task(disturb(others, number + numbers.start, stop, outcomes))
                await checked.run(numbers, concurrency)
                stop.set()

        first = jobs // 5
        await run(range(first))
        before = await settled(local)
        say(f"{first} jobs: {before}")
        started = time.monotonic()
        await run(range(first, jobs))
        seconds = time.monotonic() - started
        after = await settled(local, before, shared_machine=shared_machine)
        say(f"{jobs} jobs: {after}, {(jobs - first) / seconds:.0f} jobs/s, {dict(checked.counts.most_common())}")
        say(f"{sum(outcomes.values()) - outcomes['not removed']} hostile jobs: {dict(outcomes.most_common())}")
    failures = {status: count for status, count in outcomes.items() if status in ("HTTP 500", "not removed") and count}
    wrong = checked.wrong + [f"hostile jobs: {count} {status}" for status, count in failures.items()]
    return wrong + [f"grew: {change}" for change in before.growth(after, shared_machine=shared_machine)]


async def run(arguments: argparse.Namespace) -> list[str]:
    local = LocalSandbox(isolation=arguments.isolation, accept_unsandboxed=arguments.isolation == "rlimits")
    await local.start()
    hostile = arguments.hostile if arguments.hostile is not None else 0 if local.isolation == "rlimits" else 4
    print(f"isolation {local.isolation}, {hostile} hostile neighbours")
    try:
        return await soak(
            local,
            arguments.jobs,
            arguments.concurrency,
            hostile=hostile,
            shared_machine=arguments.shared_machine,
        )
    finally:
        await local.stop()


def conclude(work: Coroutine[None, None, list[str]], success: str) -> NoReturn:
    """Print what `work` found wrong, or `success`, and exit."""
    try:
        wrong = asyncio.run(work)
    except CannotStart as error:
        sys.exit(str(error))
    for line in wrong[:20]:
        print(line)
    print(f"{len(wrong)} wrong" if wrong else success)
    sys.exit(bool(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--hostile", type=int, help="hostile programs at once (default: 4; with rlimits, none)")
    parser.add_argument("--shared-machine", action="store_true", help="do not check the machine's own memory")
    parser.add_argument("--isolation", choices=engines.ISOLATIONS, default="auto")
    conclude(run(parser.parse_args()), "every answer was right, and nothing grew")


if __name__ == "__main__":
    main()
