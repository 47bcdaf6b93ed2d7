"""Memory of a job where no control group limits it: what is refused, what is measured, and who is delayed."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from recipe.sandbox.jail import cgroup, watchdog
from recipe.sandbox.job import Job
from recipe.sandbox.limits import Limits
from tests.sandbox.jail.conftest import Box
from tests.sandbox.jail.test_cgroup import KILLED, SMALL, SOCKETS

FORKS = """
import os, time
x = bytearray(b'x') * (800 << 20)
for _ in range(59):
    if os.fork() == 0: time.sleep(60)
print('forked', flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def watched(box_of, tmp_path_factory):
    box_of("full")  # skips where the engine cannot run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroup, "granted", lambda: None)
        box = Box("full", tmp_path_factory.mktemp("watched"))
    yield box
    box.close()


@pytest.fixture(scope="session")
def box_of(boxes, tmp_path_factory):
    def get(name: str) -> None:
        if isinstance(boxes.get(name), str):
            pytest.skip(boxes[name])

    return get


def test_status_says_what_limits_memory(watched):
    assert watched.engine.status()["memory"] == "watchdog"


def test_memory_of_all_processes(watched):
    code = (
        "import os, time\nprint('started', flush=True)\nfor n in range(6):\n"
        " if os.fork() == 0:\n  x = bytearray(b'x') * (45 << 20); time.sleep(60)\ntime.sleep(60)"
    )
    outcome = watched.run(code, limits=SMALL, timeout_s=50).run
    assert (outcome.return_code, outcome.stdout, outcome.stderr) == (-signal.SIGKILL, "started\n", KILLED)


def test_memory_that_cannot_be_measured_is_refused(watched):
    code = """
import mmap, socket
def attempt(action):
    try: action(); print("done")
    except OSError as error: print(type(error).__name__, error.errno)
attempt(lambda: mmap.mmap(-1, 1 << 20))
attempt(lambda: mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    attempt(lambda: socket.socket().setsockopt(socket.SOL_SOCKET, option, 1 << 20))
attempt(lambda: socket.socket().setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1))
"""
    assert watched.run(code).run.stdout == "OSError 12\ndone\n" + 4 * "PermissionError 1\n" + "done\n"


def test_buffers_of_tcp_do_not_grow(watched):
    code = """
import select, socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname()); peer, _ = server.accept()
client.setblocking(False)
sent = 0
while select.select([], [client], [], 0.5)[1]:
    sent += client.send(bytes(1 << 16))
print(sent < 1 << 19, open("/proc/sys/net/ipv4/tcp_rmem").read().split()[2])
open("/proc/sys/net/ipv4/tcp_rmem", "w")
"""
    run = watched.run(code, timeout_s=30).run
    assert run.stdout == "True 65536\n" and "PermissionError" in run.stderr


def test_zeros_can_be_read_but_not_shared(watched):
    """A shared mapping of the device would be memory; that of the file in its place is limited to a few megabytes."""
    assert watched.run("head -c 3000000 /dev/zero | wc -c", language="bash").run.stdout.strip() == "3000000"
    code = (
        "import mmap, os\narea = mmap.mmap(os.open('/dev/zero', os.O_RDONLY), 64 << 20, prot=mmap.PROT_READ)\n"
        "print(sum(area[n] for n in range(0, 64 << 20, 4096)))"
    )
    assert watched.run(code).run.return_code == -signal.SIGBUS
    code = "import os\ntry: os.open('/dev/zero', os.O_RDWR)\nexcept OSError as error: print(error.errno)"
    assert watched.run(code).run.stdout in ("13\n", "30\n")  # not its owner; read-only


def test_multiprocessing_works(watched):
    code = """
import multiprocessing as mp
from multiprocessing import shared_memory
def work(array, block):
    array[1] = 7
    attached = shared_memory.SharedMemory(block)
    attached.buf[0] = 9
if __name__ == "__main__":
    array, block = mp.Array("i", 3), shared_memory.SharedMemory(create=True, size=1 << 20)
    child = mp.Process(target=work, args=(array, block.name)); child.start(); child.join()
    with mp.Pool(2) as pool: print(pool.map(abs, [-1, -2]), list(array), block.buf[0])
    block.unlink()
"""
    assert watched.run(code, timeout_s=50).run.stdout == "[1, 2] [0, 7, 0] 9\n"


def test_socket_buffers_count(watched):
    outcome = watched.run(SOCKETS, limits=SMALL, timeout_s=50).run
    assert (outcome.return_code, outcome.stderr) == (-signal.SIGKILL, KILLED)


def test_a_job_that_is_slow_to_measure_delays_nobody(watched):
    async def both(timeout_s: float) -> tuple[float, float] | None:
        started = time.monotonic()
        slow = asyncio.create_task(
            watched.engine.execute(Job(FORKS, timeout_s=timeout_s, limits=Limits(memory_mb=900, processes=64)))
        )
        if await watched.printed(slow) is None:
            return None
        longest = 0.0
        while not slow.done():
            turn = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - turn)
        assert (await slow).run.status == "timeout"
        return time.monotonic() - started - timeout_s, longest

    late, longest = watched.wait(both(6)) or watched.wait(both(40))  # a busy machine may take long to fork
    assert late < 6 and longest < 1.0


def test_a_round_measures_one_process_of_each_job(monkeypatch):
    asked = []
    monkeypatch.setattr(watchdog.descent, "descendants", lambda process: [process, process + 1, process + 2])
    monkeypatch.setattr(watchdog, "_resident", lambda member: 100)
    monkeypatch.setattr(watchdog, "_socket_buffers", lambda process: 0)
    monkeypatch.setattr(watchdog, "_proportional", lambda member: asked.append(member) or member % 10 * 30)
    dog = watchdog.Watchdog()
    jobs = {"small": (10, 1000.0), "shared": (20, 250.0), "large": (30, 50.0)}
    assert dog._round(jobs) == [] and asked == [20, 30]
    assert dog._round(jobs) == [] and asked == [20, 30, 21, 31]
    assert dog._round(jobs) == ["large"] and asked == [20, 30, 21, 31, 22, 32]
    assert dog._round({"shared": jobs["shared"]}) == [] and asked[6:] == []
    dog.close()


def test_jobs_are_niced(watched):
    assert int(watched.run("import os; print(os.nice(0))").run.stdout) == os.nice(0) + 10
