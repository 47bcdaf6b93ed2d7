"""Engines that are started, damaged, cancelled, closed or killed: nothing is left, and the next call works."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from recipe.sandbox import descent, engines
from recipe.sandbox.jail.engine import JailEngine
from recipe.sandbox.job import Job
from recipe.sandbox.outcome import SandboxError
from tests.sandbox.processes import alive, until

REPOSITORY = Path(__file__).resolve().parents[3]


def test_cancelling_kills_the_job(box):
    async def cancel() -> None:
        task = asyncio.create_task(box.engine.execute(Job("import time\nwhile True: time.sleep(1)", timeout_s=60)))
        while not box.engine.status()["running"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert box.engine.status()["running"] == 0

    box.wait(cancel())


def test_cancelling_while_waiting_for_a_jail(box):
    async def cancel() -> None:
        tasks = [asyncio.create_task(box.engine.execute(Job("print(1)", timeout_s=60))) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(answer).__name__ for answer in done] == ["CancelledError", "Execution"] * 10

    box.wait(cancel())


def kill_all(pids) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it died with the previous one
            os.kill(pid, signal.SIGKILL)


def outcome_after(box, kill, **options):
    """Run a program of a minute and call `kill` with its jail's process number while it runs; return the execution,
    or the error, and the number of jails that it took."""

    async def both():
        before = box.engine.status()["jobs"]
        code = "import time; print('so far', flush=True); time.sleep(60); print('through')"
        task = asyncio.create_task(box.engine.execute(Job(code, timeout_s=60, **options)))
        run = await box.printed(task)
        kill(run._jail.number())
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        return answer, box.engine.status()["jobs"] - before

    return box.wait(both())


def test_jail_killed_while_the_program_runs(box):
    """The program may be the cause, so this is its outcome; it is not run again."""
    answer, jobs = outcome_after(box, lambda jail: kill_all([jail]))
    assert (answer.run.status, answer.run.return_code, answer.run.stdout) == ("finished", -9, "so far\n")
    assert "[sandbox] killed with its jail" in answer.run.stderr and jobs == 1


def test_zygote_killed_while_the_program_runs(box):
    """The program cannot be the cause, so this is a fault; the program may have acted, so it is not run again."""
    # The zygote alone, not its descendants too: a program that is killed before its jail is a program that ended.
    answer, jobs = outcome_after(box, lambda _jail: kill_all(descent.children(box.engine.number("lean"))))
    assert isinstance(answer, SandboxError) and "zygote died" in str(answer) and jobs == 1


@pytest.fixture
def kill_first(monkeypatch, box):
    """Kill a process of the jails that are taken, before they get their jobs."""

    def install(of_jail, count: int) -> None:
        take, left = box.engine._take, [None] * count

        async def take_and_kill(kind: str):
            jail = await take(kind)
            if left:
                left.pop()
                until(lambda: descent.children(jail.number()))
                victims = of_jail(jail.number())
                kill_all(victims)
                until(lambda: not alive(victims))
            return jail

        monkeypatch.setattr(box.engine, "_take", take_and_kill)

    return install


@pytest.mark.parametrize("of_jail", [lambda jail: [jail], descent.children], ids=["supervisor", "worker"])
def test_job_is_run_again_if_its_program_had_not_started(box, kill_first, of_jail):
    kill_first(of_jail, 1)
    before = box.engine.status()["jobs"]
    assert box.run("print('through')", timeout_s=60).run.stdout == "through\n"
    assert box.engine.status()["jobs"] == before + 2


def test_jails_that_keep_dying(box, kill_first):
    kill_first(lambda jail: [jail], 2)
    with pytest.raises(SandboxError, match="before its program started"):
        box.run("print(1)")


def test_keeper_killed_while_idle(box):
    for kind in ("lean", "sci"):
        family = descent.descendants(box.engine.number(kind))
        os.kill(box.engine.number(kind), signal.SIGKILL)
        assert until(lambda family=family: not alive(family))
    assert box.run("print(2)", timeout_s=60).run.stdout == "2\n"
    assert box.run("import numpy; print(3)", timeout_s=60).run.stdout == "3\n"


def test_zygotes_are_replaced_after_enough_jobs(tmp_path, box_of):
    box_of("full").settle()

    async def many() -> None:
        engine = JailEngine(tmp_path, ahead=2, life=12)
        await engine.start()
        try:
            seen, numbers = set(), set()
            for _ in range(600):
                if len(seen) >= 2 and len(numbers) >= 2:
                    break
                numbers.add(engine.number("lean"))
                seen.add((await engine.execute(Job("print(hash('x'))", timeout_s=60))).run.stdout)
                await asyncio.sleep(0.02)
            assert len(seen) >= 2 and len(numbers) >= 2
            long = asyncio.create_task(
                engine.execute(Job("import time; time.sleep(2); print('through')", timeout_s=60))
            )
            await asyncio.sleep(0.05)
            first = engine.number("lean")
            while engine.number("lean") == first:
                await engine.execute(Job("print(1)", timeout_s=60))
            assert (await long).run.stdout == "through\n"
        finally:
            await engine.close()

    before = descent.descendants(os.getpid())
    asyncio.run(many())
    assert until(lambda: descent.descendants(os.getpid()) <= before)


def test_closing_ends_everything(tmp_path, box_of):
    box_of("full").settle()

    async def close() -> None:
        engine = await engines.start("full", False, root=tmp_path)
        task = asyncio.create_task(engine.execute(Job("while True: pass", timeout_s=60)))
        await asyncio.sleep(0.3)
        await engine.close()
        with pytest.raises(SandboxError):
            await task
        with pytest.raises(SandboxError):
            await engine.execute(Job("print(1)"))

    before, files = descent.descendants(os.getpid()), len(os.listdir("/proc/self/fd"))
    asyncio.run(close())
    assert until(lambda: descent.descendants(os.getpid()) <= before)
    gc.collect()
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    assert list(tmp_path.iterdir()) == []


SERVER = """
import asyncio, sys
from pathlib import Path
from recipe.sandbox import engines
from recipe.sandbox.job import Job
async def main():
    engine = await engines.start("full", False, root=Path(sys.argv[1]))
    task = asyncio.create_task(engine.execute(Job(
        "import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(600)", timeout_s=600)))
    await asyncio.sleep(1)
    code = "import os; print(os.getuid(), open('/proc/self/status').read().count('CapEff:\\t0000000000000000'))"
    print((await engine.execute(Job(code))).run.stdout, flush=True)
    await task
asyncio.run(main())
"""


def serve(
    root: Path, python: str = sys.executable, source: Path = REPOSITORY, script: str = SERVER, **options
) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [python, "-c", script, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        env=environment, **options,
    )  # fmt: skip


NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}


@pytest.fixture
def open_folder():
    """A folder that every user can reach, with a copy of the sandbox."""
    for base in (tempfile.gettempdir(), "/var/tmp"):
        folder = Path(tempfile.mkdtemp(dir=base))
        try:
            folder.chmod(0o755)
            if subprocess.run(["ls", str(folder)], capture_output=True, **NOBODY).returncode == 0:
                shutil.copytree(REPOSITORY / "recipe" / "sandbox", folder / "recipe" / "sandbox")
                subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
                yield folder
                return
        finally:
            shutil.rmtree(folder)
    pytest.skip("no folder for temporary files that an unprivileged user can reach")


@pytest.fixture
def serve_as_nobody(box_of, request):
    """Return a function that runs a script with the sandbox as an unprivileged user."""
    if os.getuid() != 0:
        pytest.skip("the tests run unprivileged already")
    box_of("full")
    folder = request.getfixturevalue("open_folder")
    code = "import sys, recipe.sandbox.engines; sys.exit(sys.version_info < (3, 11))"
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            tried = subprocess.run([python, "-c", code], env=environment, cwd="/", capture_output=True, **NOBODY)
            if tried.returncode == 0:
                break
    else:
        pytest.skip("no Python 3.11 that an unprivileged user can run")
    root = folder / "root"
    root.mkdir()
    os.chown(root, 65534, 65534)
    return lambda script: serve(root, python, folder, script, **NOBODY)


@pytest.mark.parametrize("user", ["this user", "nobody"])
def test_nothing_survives_a_server_that_is_killed(user, box_of, request, tmp_path):
    box_of("full")
    server = request.getfixturevalue("serve_as_nobody")(SERVER) if user == "nobody" else serve(tmp_path)
    assert server.stdout.readline() == "61234 1\n", server.stderr.read()
    family = descent.descendants(server.pid)
    assert len(family) >= 3
    server.kill()
    server.communicate()
    assert until(lambda: not alive(family))


def test_short_soak(box):
    """Mixed jobs get correct answers and, as the fixture checks, nothing leaks (long run: examples/soak_sandbox.py)."""
    kinds = [
        ("print({n})", "{n}\n", 0),
        ("import numpy; print(int(numpy.arange({n}).sum()))", None, 0),
        ("import sys; sys.exit({n} % 100)", "", None),
        ("print('x' * 100_000)", "x" * 100_000 + "\n", 0),
        ("import subprocess; subprocess.Popen(['sleep', '99']); print({n})", "{n}\n", 0),
        ("open('f', 'w').write('{n}'); print(open('f').read())", "{n}\n", 0),
        ("1 / 0", "", 1),
    ]
    count = 210

    async def one(n: int) -> bool:
        code, stdout, status = kinds[n % len(kinds)]
        execution = await box.engine.execute(Job(code.format(n=n), timeout_s=60))
        wanted = f"{n * (n - 1) // 2}\n" if stdout is None else stdout.format(n=n)
        return execution.run.stdout == wanted and execution.run.return_code == (n % 100 if status is None else status)

    async def all_of_them() -> list[bool]:
        queue, answers = iter(range(count)), []

        async def work() -> None:
            for n in queue:
                answers.append(await one(n))

        await asyncio.gather(*(work() for _ in range(8)))
        return answers

    assert box.wait(all_of_them()) == [True] * count


def test_status_is_json(box):
    box.run("print(1)")
    status = json.loads(json.dumps(box.engine.status()))
    assert status["isolation"] == "full" and status["running"] == 0


def test_jails_are_used_once(box):
    code = "import os; print(sorted(os.listdir('/tmp'))); open('/tmp/mark', 'w').close()"
    assert len({box.run(code).run.stdout for _ in range(12)}) == 1
