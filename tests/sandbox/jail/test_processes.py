"""Attacks of a hostile program on processes, its own end included. As in test_attacks, every test also asserts, in its
fixture, that the next call answers within a second and that nothing is left."""

from __future__ import annotations

import threading

import pytest

from recipe.sandbox.limits import Limits


def test_fork_bomb(box):
    outcome = box.run("import os\nwhile True:\n try: os.fork()\n except OSError: pass", timeout_s=1).run
    assert outcome.status == "timeout" or outcome.return_code == -9


def test_limit_on_processes_is_reported(box):
    code = (
        "import os, time\nn = 0\ntry:\n while True:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\n"
        "except OSError as error: print(n, error.errno)"
    )
    assert box.run(code, limits=Limits(processes=16)).run.stdout == "15 11\n"


def test_thread_bomb(box):
    code = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    outcome = box.run(code, timeout_s=2).run
    assert outcome.status == "timeout" or "can't start new thread" in outcome.stderr


def test_daemon_is_gone_with_the_reply(box):
    code = (
        "import os, sys, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(600)\n os._exit(0)\n"
        "os.wait(); print('parent done')"
    )
    outcome = box.run(code, timeout_s=20).run
    assert outcome.stdout == "parent done\n" and outcome.return_code == 0
    assert outcome.seconds < 15


def test_daemon_that_holds_stdout_does_not_delay_the_reply(box):
    outcome = box.run("import subprocess; subprocess.Popen(['sleep', '600']); print('done')", timeout_s=20).run
    assert outcome.stdout == "done\n" and outcome.seconds < 15


def test_ignoring_every_signal_does_not_help(box):
    code = (
        "import signal\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\n"
        "print('deaf')\nwhile True: pass"
    )
    outcome = box.run_out(code, timeout_s=0.7).run
    assert (outcome.status, outcome.return_code, outcome.stdout) == ("timeout", None, "deaf\n")


def test_stopping_itself_is_a_timeout(box):
    outcome = box.run_out("import os; print('x'); os.kill(os.getpid(), 19)", timeout_s=0.5).run
    assert (outcome.status, outcome.stdout) == ("timeout", "x\n")


@pytest.mark.parametrize("target", ["1", "os.getppid()", "-1"])
def test_killing_the_supervisor(box, target):
    code = (
        f"import os\nfor n in (15, 9, 19, 2, 1):\n try: os.kill({target}, n)\n except ProcessLookupError: pass\n"
        "print('alive')"
    )
    outcome = box.run(code).run
    assert outcome.status == "finished"
    assert outcome.stdout == "alive\n" and outcome.return_code == 0


def test_flooding_the_supervisor_with_signals_does_not_stop_the_clock(box):
    outcome = box.run("import os\nwhile True: os.kill(1, 15); os.kill(1, 17)", timeout_s=0.5).run
    assert outcome.status == "timeout"


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("os.kill(os.getpid(), 9)", -9),
        ("os.abort()", -6),
        ("ctypes.string_at(0)", -11),
        ("os._exit(7)", 7),
        ("os._exit(255)", 255),
        ("os.kill(os.getpid(), 15)", -15),
    ],
)
def test_ends_of_a_process(box, act, code):
    assert box.run(f"import ctypes, os; {act}").run.return_code == code


def test_no_core_is_dumped(box):
    code = "import os\nif os.fork() == 0: os.abort()\nprint(os.WCOREDUMP(os.wait()[1]), os.listdir('.'))"
    assert box.run(code).run.stdout == "False ['tmp_program.py']\n"


@pytest.mark.parametrize(
    "code",
    [
        "import atexit, time; atexit.register(time.sleep, 600); print('x')",
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print('x')",
        "class A:\n def __del__(self):\n  while True: pass\na = A(); print('x')",
    ],
    ids=["atexit", "thread", "finalizer"],
)
def test_an_end_that_never_comes_is_a_timeout(box, code):
    outcome = box.run_out(code, timeout_s=0.7).run
    assert (outcome.status, outcome.stdout) == ("timeout", "x\n")


def test_patched_modules_do_not_reach_the_reply_or_the_next_job(box):
    code = (
        "import atexit, builtins, json, os, sys, threading\n"
        "for m in (json, os, threading, atexit):\n"
        "  for n in list(vars(m)):\n"
        "    if callable(getattr(m, n)) and n not in ('fork',): setattr(m, n, lambda *a, **k: 0 / 0)\n"
        "print('patched')\nsys.stdout.flush()"
    )
    assert box.run(code).run.stdout == "patched\n"
    assert box.run("import json, os; print(json.dumps([1]), os.getpid())").run.stdout == "[1] 2\n"


def test_deep_recursion_ends_the_job_only(box):
    for code in ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "eval('(' * 5000 + ')' * 5000)"):
        assert box.run(code, limits=Limits(memory_mb=128)).run.return_code != 0


def test_random_numbers_differ_between_jobs(box):
    code = "import random, os, uuid; print(random.random(), os.urandom(8), uuid.uuid4())"
    assert len({execution.run.stdout for execution in box.many([code] * 4)}) == 4
    code = "import numpy, random; print(numpy.random.rand(), numpy.random.default_rng().random(), random.random())"
    assert len({execution.run.stdout for execution in box.many([code] * 4, timeout_s=30)}) == 4


def test_many_jobs_at_once_keep_apart(box):
    codes = [
        f"import os; open('own', 'w').write('{n}'); print(open('own').read(), len(os.listdir('.')))" for n in range(24)
    ]
    stdouts = [execution.run.stdout for execution in box.many(codes, timeout_s=60)]
    assert stdouts == [f"{n} 2\n" for n in range(24)]


def test_engine_answers_while_another_thread_is_busy(box):
    """A blocked event loop must not time out a job that has already ended."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    thread.start()
    try:
        assert box.run("print(1)", timeout_s=30).run.stdout == "1\n"
    finally:
        stop.set()
        thread.join()
