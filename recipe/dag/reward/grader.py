"""Is this answer the right one? True or False, or a GraderFault that is no verdict.

Invariant: model text is compared in a worker process that holds nothing of value and is killed when it exceeds its
time; a killed or crashed worker is counted and raises, it never becomes a 0. verl's default scorer is not used: it
evaluates model text.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from recipe.dag.errors import GraderFault, UserError
from recipe.dag.reward.answer import hopeless, quick_equal

_START_TIMEOUT_S = 120.0
"""For importing sympy on a busy machine; not part of any grading time."""


class WorkerLost(Exception):
    """The worker died or fell silent. The text says which."""


class Worker:
    """One worker process, driven by one thread at a time; `kill` may come from any."""

    def __init__(self, command: Sequence[str]):
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict, timeout_s: float) -> dict:
        """Send one request, starting the process if there is none. Raises WorkerLost and leaves no process behind
        then."""
        try:
            process = self._process or self._start()
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            return _read_line(process, timeout_s)
        except BaseException as error:
            self.kill()
            if isinstance(error, OSError | ValueError):
                raise WorkerLost("died") from error
            raise

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):
                process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        keep = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
        env = {name: os.environ[name] for name in keep if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        try:
            hello = _read_line(process, _START_TIMEOUT_S)
        except WorkerLost as error:
            raise WorkerLost(f"{error} while starting") from error
        if not hello["ready"]:
            raise UserError(f"the math grader cannot start: {hello['error']}; pip install math-verify")
        return process


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> dict:
    """The next line, as JSON. The worker answers line by line, so nothing is ever left over."""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    deadline, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise WorkerLost("timeout")
        chunk = os.read(process.stdout.fileno(), 65536)
        if not chunk:
            raise WorkerLost("died")
        line += chunk
    return json.loads(line)


class GraderPool:
    """Workers started when first needed. May be used from several event loops, and threads, at once.

    counters: graded, quick (decided without algebra), hopeless (see `answer.hopeless`), symbolic, timeouts, crashes.
    """

    def __init__(
        self,
        workers: int = 1,
        timeout_s: float = 10.0,
        *,
        max_waiting: int = 10_000,
        counters: Counter[str] | None = None,
        command: Sequence[str] | None = None,
    ):
        command = command or (sys.executable, "-P", str(Path(__file__).with_name("grader_worker.py")))
        self.timeout_s = timeout_s
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._max_waiting = max_waiting
        self._waiting = 0
        self._lock = threading.Lock()
        self._workers = [Worker(command) for _ in range(workers)]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # A thread of its own per worker: plain pipes know no event loop, and so outlive every one of them.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        atexit.register(self.shutdown)

    async def grade(self, prediction: str, truth: str, timeout_s: float | None = None) -> bool:
        """Whether the two mean the same. `timeout_s` counts from when a worker takes the pair up. Raises
        GraderFault."""
        self._count("graded")
        if (quick := quick_equal(prediction, truth)) is not None:
            self._count("quick")
            return quick
        if not prediction.strip() or hopeless(prediction, truth):
            self._count("hopeless")
            return False
        with self._lock:
            if self._waiting >= self._max_waiting:
                raise GraderFault(f"{self._waiting} comparisons are waiting already", where="grader")
            self._waiting += 1
        request = {"prediction": prediction, "truth": truth, "timeout_s": timeout_s or self.timeout_s}
        job = self._threads.submit(self._compare, request)
        job.add_done_callback(self._left)
        return await asyncio.wrap_future(job)

    def shutdown(self) -> None:
        """Kill the workers. The pool cannot be used afterwards."""
        atexit.unregister(self.shutdown)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    async def close(self) -> None:
        await asyncio.to_thread(self.shutdown)

    def _compare(self, request: dict) -> bool:
        worker = self._idle.get()
        try:
            answer = worker.ask(request, request["timeout_s"])
        except WorkerLost as error:
            self._count("timeouts" if str(error) == "timeout" else "crashes")
            raise GraderFault(f"grader worker: {error} after {request['timeout_s']:g} s", where="grader") from error
        finally:
            self._idle.put(worker)
        self._count("symbolic")
        return answer["equal"]

    def _left(self, _job: object) -> None:
        with self._lock:
            self._waiting -= 1

    def _count(self, name: str) -> None:
        with self._lock:
            self.counters[name] += 1


counters: Counter[str] = Counter()
"""What the process-wide pool has done."""
_pool: tuple[int, GraderPool] | None = None
_pool_lock = threading.Lock()


async def grade(prediction: str, truth: str, timeout_s: float = 10.0) -> bool:
    """`GraderPool.grade` on a pool that this process shares and starts when first needed."""
    return await _shared_pool().grade(prediction, truth, timeout_s)


def _shared_pool() -> GraderPool:
    global _pool
    with _pool_lock:
        # A forked child must not talk into its parent's pipes.
        if _pool is None or _pool[0] != os.getpid():
            cores = len(os.sched_getaffinity(0))
            _pool = (os.getpid(), GraderPool(workers=max(1, min(4, cores // 2)), counters=counters))
        return _pool[1]
