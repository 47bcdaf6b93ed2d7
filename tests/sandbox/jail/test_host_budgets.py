"""Budgets that the kernel counts for the host's user, and outcomes that a program must not choose."""

from __future__ import annotations

import fcntl
import json
import os
import signal

import pytest

from recipe.sandbox.jail import program
from tests.sandbox.jail.test_attacks import CALL, TRIES, answers
from tests.sandbox.jail.test_lifecycle import open_folder, serve_as_nobody  # noqa: F401 - fixtures

_SET_PIPE_SIZE = 1031


@pytest.fixture
def small_pipes(monkeypatch):
    """Pipes as the kernel makes them for a user who has very many: two pages."""
    make = os.pipe2

    def small(flags: int) -> tuple[int, int]:
        read, write = make(flags)
        fcntl.fcntl(read, _SET_PIPE_SIZE, 8192)
        return read, write

    monkeypatch.setattr(os, "pipe2", small)


def test_output_passes_through_a_small_pipe(box, small_pipes):
    run = box.run("import os\nfor _ in range(4): os.write(1, b'x' * 3003)\nprint('end')").run
    assert (run.status, len(run.stdout)) == ("finished", 4 * 3003 + 4)


@pytest.mark.parametrize("size", [0, 8192, 30_000, 200_000])
def test_stdin_never_waits_for_a_small_pipe(box, small_pipes, size):
    run = box.run("import sys\nprint(len(sys.stdin.read()))", stdin="x" * size).run
    assert (run.status, run.stdout) == ("finished", f"{size}\n")


WITHOUT_PIPES = """
import asyncio, json, sys
from pathlib import Path
from recipe.sandbox import engines
from recipe.sandbox.job import Job
HOARD = '''
import os, time
for _ in range(15):
    if os.fork() == 0:
        pipes = [os.pipe() for _ in range(120)]
        os.write(1, b'x')
        time.sleep(60)
time.sleep(60)
'''
async def main():
    engine = await engines.start("full", False, root=Path(sys.argv[1]))
    hoard = asyncio.create_task(engine.execute(Job(HOARD, timeout_s=60)))
    while not engine._running:
        await asyncio.sleep(0.01)
    (run,) = engine._running
    while len(run._pumps[0]._kept) < 15:
        await asyncio.sleep(0.01)
    answers = {"memory": engine.status()["memory"], "hoards": not hoard.done()}
    code = "import os\\nfor _ in range(4): os.write(1, b'x' * 3003)\\nprint('end')"
    output = await engine.execute(Job(code, timeout_s=20))
    answers["output"] = [output.run.status, len(output.run.stdout)]
    turns = []
    for _ in range(4):
        code = "import sys; print(len(sys.stdin.read()))"
        turns.append((await engine.execute(Job(code, stdin="x" * 30_000, timeout_s=20))).run.stdout)
    answers["input"] = turns
    print(json.dumps(answers), flush=True)
    hoard.cancel()
    await asyncio.wait([hoard])
    await engine.close()
asyncio.run(main())
"""


def test_a_server_whose_user_has_no_pipe_budget_left(serve_as_nobody):  # noqa: F811
    """A neighbour holds 1,800 pipes: what the kernel still gives this user are pipes of two pages."""
    server = serve_as_nobody(WITHOUT_PIPES)
    stdout, stderr = server.communicate(timeout=120)
    assert stdout, stderr
    assert json.loads(stdout) == {
        "memory": "watchdog",
        "hoards": True,
        "output": ["finished", 4 * 3003 + 4],
        "input": ["30000\n"] * 4,
    }


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_calls_that_use_up_what_the_host_shares_are_refused(box):
    code = f"""{TRIES}{CALL}
import fcntl, mmap, socket
attempt('inotify', lambda: call(294, 0))
attempt('aio', lambda: call(206, 8, id(bytearray(8))))
attempt('lease', lambda: fcntl.fcntl(os.open(sys.executable, os.O_RDONLY), 1024, 0))
attempt('notify', lambda: fcntl.fcntl(os.open('/usr/bin', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS))
attempt('pipe', lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20))
attempt('huge', lambda: mmap.mmap(-1, 1 << 21, flags=0x40022))
attempt('sctp', lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132))
attempt('flags', lambda: fcntl.fcntl(0, fcntl.F_GETFD) >= 0)
attempt('netlink', lambda: socket.socketpair(16, socket.SOCK_RAW))
attempt('unix', lambda: bool(socket.socketpair()))
"""
    others = {"huge": "ENOMEM", "sctp": "EPROTONOSUPPORT", "netlink": "EAFNOSUPPORT"}
    refused = dict.fromkeys(["inotify", "aio", "lease", "notify", "pipe"], "EPERM")
    assert answers(box.run(code)) == refused | others | {"flags": "DONE True", "unix": "DONE True"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_signals_to_the_first_process_neither_stop_the_job_nor_use_up_the_users(box):
    """Beyond the limit the kernel drops who sent a signal, which once made any sender look like the server."""
    code = """
import ctypes, os, struct, time
call = ctypes.CDLL(None).syscall
for target in (1, os.getpid()):
    own = struct.pack("4iii", 40, 0, -1, 0, os.getpid(), os.getuid()).ljust(128, b"\\0")
    sent = 0
    while sent < 200_000 and call(129, target, 40, own) == 0:  # rt_sigqueueinfo, to a signal that is blocked
        sent += 1
    print(sent)
    import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
for _ in range(5):
    call(234, 1, 1, 15)  # tgkill
    os.kill(1, 15)
    time.sleep(0.05)
print('end')
"""
    run = box.run(code, timeout_s=30).run
    assert (run.status, run.return_code) == ("finished", 0)
    *sent, end = run.stdout.split()
    assert end == "end" and sum(map(int, sent)) <= program.MAX_PENDING_SIGNALS


def test_jobs_die_before_the_trainer_when_memory_runs_out(box):
    assert box.run("print(open('/proc/self/oom_score_adj').read())").run.stdout.strip() == "1000"


def test_a_program_cannot_send_itself_a_time_out(box):
    run = box.run("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)").run
    assert (run.status, run.return_code) == ("finished", -signal.SIGXCPU)


def test_sympys_generator_differs_between_programs(box):
    pytest.importorskip("sympy")
    code = "import sympy, sympy.core.random as r\nprint(sympy.randprime(10**6, 10**9), r.rng.random())"
    assert len({box.run(code).run.stdout for _ in range(3)}) == 3
