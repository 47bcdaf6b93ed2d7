"""The server over real HTTP, and how a run starts, loses and stops it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from recipe.dag.errors import SandboxFault, UserError
from recipe.dag.sandbox import launch, survivors
from recipe.dag.sandbox.launch import LocalSandbox

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    local = LocalSandbox(max_concurrent=2)
    asyncio.run(local.start())
    yield local
    local.close()


def post(local: LocalSandbox, body: object, **options) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {local.token}"}
    return httpx.post(f"{local.url}/run_code", content=content, headers=headers, timeout=60, **options)


def python(code: str, **fields: object) -> dict:
    return {"code": code, "language": "python", **fields}


def test_answer_has_sandboxfusions_shape(sandbox):
    answer = post(sandbox, python("print(6 * 7)", session="unknown fields are ignored", run_timeout="5")).json()
    assert answer["run_result"].pop("execution_time") > 0
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": ""},
        "executor_pod_name": None,
        "files": {},
    }


def test_failing_and_slow_programs_are_answers(sandbox):
    failed = post(sandbox, python("1/0")).json()
    slow = post(sandbox, python("import time; time.sleep(60)", run_timeout=0.3)).json()
    assert (failed["status"], failed["run_result"]["status"], failed["run_result"]["return_code"]) == (
        "Failed",
        "Finished",
        1,
    )
    assert (slow["status"], slow["run_result"]["status"], slow["run_result"]["return_code"]) == (
        "Failed",
        "TimeLimitExceeded",
        None,
    )


def test_what_cannot_run_is_a_sandbox_error(sandbox):
    answer = post(sandbox, python("pass", files={"../up": ""})).json()
    assert answer["status"] == "SandboxError" and "../up" in answer["message"] and answer["run_result"] is None


def test_files_go_in_and_come_out(sandbox):
    body = python("open('out', 'w').write(open('in').read() + '!')", files={"in": "aGk="}, fetch_files=["out", "none"])
    assert post(sandbox, body).json()["files"] == {"out": "aGkh"}


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[" * 100_000,
        b"\xff",
        [],
        {"code": "print(1)"},
        {"language": "python"},
        python("x", language="cobol"),
        {"code": 5, "language": "python"},
        python("x", run_timeout=None),
        python("x", run_timeout="NaN"),
        python("x", memory_limit_MB="much"),
        python("x", stdin=5),
        python("x", files=["a"]),
        python("x", files={"a": 1}),
        python("x", fetch_files="a"),
        python("\ud800"),
    ],
    ids=lambda body: str(body)[:40],
)
def test_malformed_requests_are_422(sandbox, body):
    answer = post(sandbox, body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["msg"]


def test_too_large_a_body_is_413(sandbox):
    assert post(sandbox, b" " * ((32 << 20) + 1)).status_code == 413


def test_memory_limit_of_the_request_holds(sandbox):
    answer = post(sandbox, python("bytearray(300 << 20)", memory_limit_MB=200)).json()
    assert "MemoryError" in answer["run_result"]["stderr"]


def test_without_the_token_nothing_runs(sandbox):
    assert httpx.post(f"{sandbox.url}/run_code", json=python("1")).status_code == 401
    assert httpx.get(f"{sandbox.url}/v1/ping", headers={"Authorization": "Bearer \u00e9".encode()}).status_code == 401


def test_ping_and_status(sandbox):
    headers = {"Authorization": f"Bearer {sandbox.token}"}
    assert httpx.get(f"{sandbox.url}/v1/ping", headers=headers).json() == "pong"
    status = httpx.get(f"{sandbox.url}/v1/status", headers=headers).json()
    assert status == {"queue": 0, "running": 0, "isolation": "rlimits"}


def test_listens_on_loopback_only(sandbox):
    port = f"{int(sandbox.url.rsplit(':', 1)[1]):04X}"
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert [address for address in listening if address.endswith(f":{port}")] == [f"0100007F:{port}"]


def test_jobs_cannot_read_secrets_from_the_server(sandbox):
    code = (
        "import os; print(open(f'/proc/{os.getppid()}/environ').read(), open(f'/proc/{os.getppid()}/cmdline').read())"
    )
    stdout = post(sandbox, python(code)).json()["run_result"]["stdout"]
    assert "recipe.dag.sandbox.server" in stdout
    assert sandbox.token not in stdout and "SECRET" not in stdout


@pytest.fixture(scope="module", autouse=True)
def secret() -> Iterator[None]:
    os.environ["MY_SECRET"] = "value"
    yield
    del os.environ["MY_SECRET"]


def test_a_daemon_that_hides_everything_dies_all_the_same(sandbox):
    code = (
        "import os\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  os.chdir('/')\n"
        "  os.execvpe('sleep', ['sleep', '7123'], {})\n os._exit(0)\nos.wait(); print('left')"
    )
    assert post(sandbox, python(code)).json()["run_result"]["stdout"] == "left\n"
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(path.read_text())
    assert any("recipe.dag.sandbox.server" in command for command in commands)
    assert "sleep\x007123\0" not in commands


def test_full_queue_is_504_and_hanging_up_kills_the_job():
    async def scenario() -> None:
        command = [
            sys.executable,
            "-m",
            "recipe.dag.sandbox.server",
            "--port",
            "0",
            "--max-concurrent",
            "1",
            "--max-queue",
            "0",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, env=ENV)
        try:
            url = json.loads(server.stdout.readline())["url"]
            async with httpx.AsyncClient(timeout=30) as http:
                long = asyncio.create_task(
                    http.post(f"{url}/run_code", json=python("import time; time.sleep(60)", run_timeout=60))
                )
                await until(http, url, running=1)
                refused = await http.post(f"{url}/run_code", json=python("print(1)"))
                assert refused.status_code == 504 and refused.headers["Retry-After"] == "1"
                long.cancel()
                await until(http, url, running=0)
                assert (await http.post(f"{url}/run_code", json=python("print(1)"))).json()["status"] == "Success"
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(10) == 0
            server.stdout.close()

    asyncio.run(scenario())


async def until(http: httpx.AsyncClient, url: str, running: int) -> None:
    while (await http.get(f"{url}/v1/status")).json()["running"] != running:
        await asyncio.sleep(0.02)


def remains(root: Path) -> tuple[bool, list[int]]:
    return root.exists(), list(survivors.anywhere(root))


async def start_long_job(local: LocalSandbox) -> asyncio.Task:
    async def job() -> None:
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {local.token}"}) as http:
            await http.post(f"{local.url}/run_code", json=python("import time; time.sleep(60)", run_timeout=60))

    task = asyncio.create_task(job())
    while not list(survivors.anywhere(local._root)):
        await asyncio.sleep(0.02)
    return task


def test_stop_leaves_nothing_although_a_job_runs():
    async def scenario() -> Path:
        local = LocalSandbox()
        await local.start()
        root = local._root
        job = await start_long_job(local)
        await local.stop()
        with pytest.raises(httpx.TransportError):
            await job
        return root

    assert remains(asyncio.run(scenario())) == (False, [])


def test_restart_after_a_kill_keeps_the_address_and_clears_up():
    local = LocalSandbox()

    async def scenario() -> tuple[str, Path]:
        url = await local.start()
        root = local._root
        job = await start_long_job(local)
        os.kill(local._process.pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await job
        await asyncio.gather(*(local.ensure() for _ in range(5)))
        return url, root

    url, root = asyncio.run(scenario())
    try:
        assert (local.url, local.restarts) == (url, 1)
        assert remains(root) == (False, [])
        asyncio.run(local.ensure())
        assert local.restarts == 1
        assert post(local, python("print(1)")).json()["status"] == "Success"
    finally:
        local.close()


def test_a_server_that_hangs_is_replaced(monkeypatch):
    monkeypatch.setattr(launch, "_PING_TIMEOUT_S", 0.3)
    monkeypatch.setattr(launch, "_STOP_TIMEOUT_S", 0.3)
    local = LocalSandbox()
    asyncio.run(local.start())
    try:
        os.kill(local._process.pid, signal.SIGSTOP)
        asyncio.run(local.ensure())
        assert local.restarts == 1
        assert post(local, python("print(1)")).status_code == 200
    finally:
        local.close()


def test_server_ends_with_its_parent():
    code = (
        "import asyncio, os\nfrom recipe.dag.sandbox.launch import LocalSandbox\n"
        "s = LocalSandbox()\nasyncio.run(s.start())\nprint(s._process.pid, s._root, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, check=False)
    pid, root = parent.stdout.split()
    deadline = time.monotonic() + 20
    while (os.path.exists(root) or alive(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(root) and not alive(pid)


def alive(pid: str) -> bool:
    """Zombies are not: nobody may be there to collect them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_exit_of_the_interpreter_stops_the_server():
    code = (
        "import asyncio\nfrom recipe.dag.sandbox.launch import LocalSandbox\n"
        "s = LocalSandbox()\nasyncio.run(s.start())\nprint(s._root, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 0 and not os.path.exists(done.stdout.strip())
    assert "no security boundary" in done.stderr


def test_ensure_before_start_is_a_fault_and_a_failed_start_a_user_error(monkeypatch):
    with pytest.raises(SandboxFault, match="not started"):
        asyncio.run(LocalSandbox().ensure())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="did not start"):
        asyncio.run(LocalSandbox().start())


def test_server_imports_nothing_heavy():
    code = "import sys, recipe.dag.sandbox.server; print({'torch', 'pandas', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, check=False)
    assert done.stdout == "set()\n"
