"""Comparison of an answer with the ground truth: True, False, or a GraderFault, which is not a verdict.

Invariant: model text is compared in a worker process that holds no secrets and is killed when it exceeds its time
limit. A worker that is lost before it begins is a fault. A comparison that loses two workers has used up its budget:
the answer is wrong, since a fault would let the text that stalls a worker have its episode sampled again. verl's
default scorer is not used, because it evaluates model text.
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
from typing import IO, Any

from recipe.dag.core.errors import GraderFault, UserError
from recipe.dag.reward.answer import hopeless, plain_spelling, quick_equal

_START_TIMEOUT_S = 120.0
"""Limit for importing sympy on a busy machine; not part of the grading time."""


class WorkerLost(Exception):
    """The worker died or timed out; the text says which. `began`: it had taken the request."""

    def __init__(self, text: str, *, began: bool = True):
        super().__init__(text)
        self.began = began


class Undecided(Exception):
    """The comparison used up its budget; the text says how."""


class Worker:
    """One worker process, used by one thread at a time; any thread may call `kill`."""

    def __init__(self, command: Sequence[str]):
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict, timeout_s: float) -> dict:
        """Send one request and return the answer, starting the process if needed. Raises WorkerLost, after which the
        process is gone."""
        try:
            process = self._process or self._start()
            stdin = _pipe(process.stdin)
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
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
            _pipe(process.stdout).close()
            with suppress(BrokenPipeError):
                _pipe(process.stdin).close()

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
            raise WorkerLost(f"{error} while starting", began=False) from error
        if not hello["ready"]:
            raise UserError(f"the grader cannot start: {hello['error']}; pip install {hello['package']}")
        return process


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # `_start` opens stdin and stdout as pipes
    return stream


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> dict:
    """Read the next line as JSON. The worker writes one line per request, so no bytes remain."""
    stdout = _pipe(process.stdout)
    poll = select.poll()
    poll.register(stdout, select.POLLIN)
    deadline, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            raise WorkerLost("timeout")
        chunk = os.read(stdout.fileno(), 65536)
        if not chunk:
            raise WorkerLost("died")
        line += chunk
    return json.loads(line)


class GraderPool:
    """Workers that are started on first use. Several event loops and threads may use the pool at once.

    counters: graded, quick (decided without algebra), hopeless (see `answer.hopeless`), symbolic, undecided (two
    workers were lost, and the answer is wrong); timeouts and crashes of workers.
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
        self._closed = False
        self._lock = threading.Lock()
        self._workers = [Worker(command) for _ in range(workers)]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # one thread per worker: plain pipes do not belong to an event loop, so the pool outlives any of them
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        atexit.register(self.shutdown)

    async def grade(self, prediction: str, truth: str, timeout_s: float | None = None) -> bool:
        """Return True if the two are equal, and False if the comparison does not end in two attempts of `timeout_s`,
        which starts when a worker takes the pair. Raises GraderFault."""
        try:
            return await self.decide(prediction, truth, timeout_s)
        except Undecided:
            return False

    async def decide(self, prediction: str, truth: str, timeout_s: float | None = None) -> bool:
        """Return True if the two are equal. Raises Undecided, and GraderFault."""
        self._count("graded")
        if (quick := quick_equal(prediction, truth)) is not None:
            self._count("quick")
            return quick
        if not prediction.strip() or hopeless(prediction, truth):
            self._count("hopeless")
            return False
        request = {"prediction": plain_spelling(prediction), "truth": plain_spelling(truth)}
        return (await self.ask(request, timeout_s))["equal"]

    async def ask(self, request: dict, timeout_s: float | None = None) -> dict:
        """Return a worker's answer to a request. `timeout_s` starts when a worker takes it. Raises Undecided, and
        GraderFault."""
        with self._lock:
            if self._waiting >= self._max_waiting:
                raise GraderFault(f"{self._waiting} comparisons are already waiting", where="grader")
            self._waiting += 1
        job = self._threads.submit(self._compare, request | {"timeout_s": timeout_s or self.timeout_s})
        job.add_done_callback(self._on_done)
        return await asyncio.wrap_future(job)

    def shutdown(self) -> None:
        """Kill the workers; the pool cannot be used afterwards."""
        atexit.unregister(self.shutdown)
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    async def close(self) -> None:
        await asyncio.to_thread(self.shutdown)

    def _compare(self, request: dict) -> dict:
        worker = self._idle.get()
        try:
            try:
                answer = self._attempt(worker, request)
            except WorkerLost as lost:
                if not lost.began:
                    raise
                # the machine may have been busy, or the worker killed from outside; a text that does it does it again
                answer = self._attempt(worker, request)
        except WorkerLost as lost:
            reason = f"grader worker: {lost}, limit {request['timeout_s']:g} s"
            if self._closed or not lost.began:
                raise GraderFault(reason, where="grader") from lost
            self._count("undecided")
            raise Undecided(reason) from lost
        finally:
            self._idle.put(worker)
        self._count("symbolic")
        return answer

    def _attempt(self, worker: Worker, request: dict) -> dict:
        if self._closed:
            raise WorkerLost("the pool was closed", began=False)
        try:
            return worker.ask(request, request["timeout_s"])
        except WorkerLost as lost:
            self._count("timeouts" if str(lost) == "timeout" else "crashes")
            raise

    def _on_done(self, _job: object) -> None:
        with self._lock:
            self._waiting -= 1

    def _count(self, name: str) -> None:
        with self._lock:
            self.counters[name] += 1


counters: Counter[str] = Counter()
"""The counters of the process-wide pool."""


async def grade(prediction: str, truth: str, timeout_s: float = 10.0) -> bool:
    """Call `GraderPool.grade` on the process-wide pool, which is started on first use."""
    return await _shared_pool().grade(prediction, truth, timeout_s)


async def decide(prediction: str, truth: str, timeout_s: float = 10.0) -> bool:
    """Call `GraderPool.decide` on the process-wide pool."""
    return await _shared_pool().decide(prediction, truth, timeout_s)


class SharedPool:
    """The process-wide pool with these options of GraderPool, which is made when it is first called for."""

    def __init__(self, **options: Any):
        self._options, self._lock = options, threading.Lock()
        self._pool: tuple[int, GraderPool] | None = None

    def __call__(self) -> GraderPool:
        with self._lock:
            # a forked child must not write into its parent's pipes
            if self._pool is None or self._pool[0] != os.getpid():
                cores = len(os.sched_getaffinity(0))
                self._pool = (os.getpid(), GraderPool(workers=max(1, min(4, cores // 2)), **self._options))
            return self._pool[1]


_shared_pool = SharedPool(counters=counters)
