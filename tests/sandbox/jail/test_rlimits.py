"""Without a wall: the same results, and nothing of a program is left. Isolation is not tested, since there is none."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading

import pytest

from recipe.sandbox import descent, engines
from recipe.sandbox.jail import engine, watchdog
from recipe.sandbox.job import Job
from recipe.sandbox.limits import Limits
from tests.sandbox.processes import until


def run(root, *jobs: Job) -> list:
    """Return the jobs' executions. Afterwards no process and no file may be left."""

    async def work() -> list:
        started = await engines.start("rlimits", True, root=root)
        try:
            return [await started.execute(job) for job in jobs]
        finally:
            await started.close()

    before = descent.descendants(os.getpid())
    executions = asyncio.run(work())
    assert list(root.iterdir()) == []
    assert until(lambda: descent.descendants(os.getpid()) <= before)
    return executions


def test_outcomes(tmp_path):
    executions = run(
        tmp_path,
        Job("import sys; print(input()); sys.exit(3)", stdin="typed"),
        Job("1 / 0"),
        Job("print('so far', flush=True)\nwhile True: pass", timeout_s=4.0),
        Job("open('out', 'w').write('x'); print(open('in').read())", files={"in": "eQ=="}, fetch=["o*"]),
        Job("bytearray(600 << 20)", limits=Limits(memory_mb=256)),
        Job("ls", language="bash"),
    )
    assert [execution.run.return_code for execution in executions] == [3, 1, None, 0, 1, 0]
    assert executions[0].run.stdout == "typed\n"
    assert 'File "/tmp/tmp_sandbox/tmp_program.py", line 1' in executions[1].run.stderr
    assert executions[2].run.stdout == "so far\n" and executions[2].run.status == "timeout"
    assert executions[3].run.stdout == "y\n" and executions[3].files == {"out": "eA=="}
    assert "MemoryError" in executions[4].run.stderr
    assert executions[5].run.stdout == "tmp_program.sh\n"


@pytest.mark.parametrize("then", ["", "time.sleep(60)"], ids=["after exit", "after timeout"])
def test_daemons_end_with_the_call(tmp_path, then):
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.chdir('/')\n"
        f"        os.execvpe('sleep', ['sleep', '600'], {{}})\n    os._exit(0)\ntime.sleep(0.2)\n{then}"
    )
    (execution,) = run(tmp_path, Job(code, timeout_s=1.0 if then else 60.0))
    assert execution.run.status == ("timeout" if then else "finished")


def test_files_are_deleted_beside_the_event_loop(tmp_path, monkeypatch):
    """A program may have made millions."""
    threads = []

    def remove(path):
        threads.append(threading.current_thread())
        shutil.rmtree(path)

    monkeypatch.setattr(engine.removal, "remove", remove)
    run(tmp_path, Job("print(1)"))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_sockets_of_the_servers_namespace_do_not_count(tmp_path):
    pairs = [socket.socketpair() for _ in range(400)]
    try:
        with subprocess.Popen(["sleep", "60"]) as process:
            assert list(watchdog.measured(process.pid, 40 << 20)) in ([], [False])
            process.kill()
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def test_a_cancelled_job_ends(tmp_path):
    async def cancel() -> None:
        started = await engines.start("rlimits", True, root=tmp_path)
        task = asyncio.create_task(started.execute(Job("import time; time.sleep(600)", timeout_s=600)))
        while not started.status()["running"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(tmp_path.iterdir()) == []
        await started.close()

    asyncio.run(cancel())
