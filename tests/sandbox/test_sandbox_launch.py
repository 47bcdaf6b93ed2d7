"""How a run starts, restarts and stops its sandbox."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from recipe.sandbox import launch
from recipe.sandbox.errors import CannotStart
from recipe.sandbox.launch import LocalSandbox
from tests.sandbox.processes import alive, sleepers, until

SECONDS = str(700_000 + os.getpid())
LONG = f"import subprocess; subprocess.run(['sleep', '{SECONDS}'])"
LEVELS = {"full": {"isolation": "full"}, "rlimits": {"isolation": "rlimits", "accept_unsandboxed": True}}


@pytest.fixture(params=LEVELS)
def options(request):
    """The options of each isolation level, for tests that apply to all of them."""
    if request.param == "full":
        request.getfixturevalue("full_isolation")
    return LEVELS[request.param]


def remains(root: Path | str, *pids: str) -> list[str]:
    """Return the directory, processes and jobs that are left after a killed process tree had time to end."""

    def left() -> list[str]:
        return [str(root)] * os.path.exists(root) + [pid for pid in pids if alive([int(pid)])] + sleepers(SECONDS)

    until(lambda: not left())
    return left()


async def start_long_job(local: LocalSandbox, caller) -> asyncio.Task:
    async def job() -> None:
        async with caller(local).connect() as http:
            await http.post("/run_code", json={"code": LONG, "language": "python", "run_timeout": 60})

    task = asyncio.create_task(job())
    while not sleepers(SECONDS):
        assert not task.done()
        await asyncio.sleep(0.02)
    return task


def test_stop_leaves_nothing_although_a_job_runs(options, caller):
    async def scenario() -> Path:
        local = LocalSandbox(**options)
        await local.start()
        root = local.root
        job = await start_long_job(local, caller)
        await local.stop()
        with pytest.raises(httpx.TransportError):
            await job
        return root

    assert remains(asyncio.run(scenario())) == []


def test_restart_after_a_kill_keeps_the_address_and_clears_up(options, caller):
    local = LocalSandbox(**options)

    async def scenario() -> tuple[str, Path]:
        url = await local.start()
        root = local.root
        job = await start_long_job(local, caller)
        os.kill(local.pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await job
        await asyncio.gather(*(local.ensure() for _ in range(5)))
        return url, root

    url, root = asyncio.run(scenario())
    try:
        assert (local.url, local.restarts) == (url, 1)
        assert remains(root) == []
        asyncio.run(local.ensure())
        assert local.restarts == 1
        assert caller(local).stdout("print(1)") == "1\n"
    finally:
        local.close()


def test_a_server_that_hangs_is_replaced(options, caller, monkeypatch):
    monkeypatch.setattr(launch, "_PING_TIMEOUT_S", 0.3)
    monkeypatch.setattr(launch, "_STOP_TIMEOUT_S", 0.3)
    local = LocalSandbox(**options)
    asyncio.run(local.start())
    try:
        root = local.root
        os.kill(local.pid, signal.SIGSTOP)
        asyncio.run(local.ensure())
        assert local.restarts == 1 and remains(root) == []
        assert caller(local).stdout("print(1)") == "1\n"
    finally:
        local.close()


@pytest.mark.parametrize(
    "end",
    ["os.kill(os.getpid(), 9)", "pass", "os.kill(s.pid, 9); os.kill(os.getpid(), 9)"],
    ids=["killed", "exit", "both killed"],
)
def test_server_ends_with_its_parent(options, env, end):
    code = (
        "import asyncio, os\nfrom recipe.sandbox.launch import LocalSandbox\n"
        f"s = LocalSandbox(**{options})\nasyncio.run(s.start())\nprint(s.pid, s.root, s.socket, flush=True)\n{end}"
    )
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    pid, root, address = parent.stdout.split()
    assert remains(root, pid) == remains(os.path.dirname(address)) == []
    assert ("no security boundary" in parent.stderr) == (options["isolation"] == "rlimits")


STRANGER = """
import os, socket, sys
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
for attempt in (lambda s: s.connect(sys.argv[1]), lambda s: os.unlink(sys.argv[1]), lambda s: s.bind(sys.argv[1]),
                lambda s: os.rename(os.path.dirname(sys.argv[1]), sys.argv[1] + "2")):
    try:
        attempt(socket.socket(socket.AF_UNIX))
    except PermissionError:
        print("refused")
"""


def test_nobody_else_reaches_or_takes_the_address(caller):
    """Not even while the server is down."""
    local = LocalSandbox(**LEVELS["rlimits"])
    asyncio.run(local.start())
    try:
        folder = Path(local.socket).parent
        assert local.url == f"http+unix://{quote(local.socket, safe='')}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
        descriptors = [os.readlink(entry) for entry in Path(f"/proc/{local.pid}/fd").iterdir()]
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{local.pid}/net/{table}").read_text().splitlines()[1:]
            assert not {f"socket:[{line.split()[9]}]" for line in lines} & set(descriptors)
        for _ in range(2):
            if os.getuid() == 0:
                command = [sys.executable, "-S", "-c", STRANGER, local.socket]
                done = subprocess.run(command, capture_output=True, text=True, cwd="/")
                assert done.stdout.split() == ["refused"] * 4, done.stderr
            os.kill(local.pid, signal.SIGKILL)
            assert until(lambda: not alive([local.pid]))
        asyncio.run(local.ensure())
        assert caller(local).stdout("print(1)") == "1\n"
    finally:
        local.close()
    assert not folder.exists() and local.url == ""


def test_a_long_folder_for_temporary_files_is_not_used_for_the_socket(caller, monkeypatch, tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setenv("TMPDIR", str(long))  # the server's
    local = LocalSandbox(**LEVELS["rlimits"])
    asyncio.run(local.start())
    try:
        assert local.socket.startswith("/tmp/") and local.root.parent == long
        assert caller(local).stdout("print(1)") == "1\n"
    finally:
        local.close()


def test_without_a_place_for_the_socket_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/absent")  # a long path would be left for a shorter one
    with pytest.raises(CannotStart, match="socket in .*absent: No such file.*; set TMPDIR to a folder"):
        asyncio.run(LocalSandbox().start())


def test_a_sandbox_that_cannot_start_gives_the_reason(monkeypatch):
    with pytest.raises(CannotStart, match="not started"):
        asyncio.run(LocalSandbox().ensure())
    with pytest.raises(CannotStart, match="not a security boundary") as caught:
        asyncio.run(LocalSandbox(isolation="rlimits").start())
    assert "\n" not in str(caught.value)
    with pytest.raises(CannotStart, match="isolation 'none' is not one of auto, full, landlock, rlimits"):
        asyncio.run(LocalSandbox(isolation="none").start())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CannotStart, match="did not start"):
        asyncio.run(LocalSandbox().start())


def test_server_imports_nothing_heavy(env):
    heavy = "{'torch', 'pandas', 'numpy', 'ray', 'verl', 'sglang', 'transformers', 'fastapi'}"
    code = f"import sys, recipe.sandbox.embedded; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "set()\n"
