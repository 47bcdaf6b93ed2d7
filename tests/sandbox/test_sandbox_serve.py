"""`python -m recipe.sandbox` and `verl-dag sandbox serve` from an operator's view: addresses, refusals and shutdown."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest

from recipe.sandbox import server as serving
from tests.sandbox.processes import sleepers, until

SECONDS = str(800_000 + os.getpid())
LONG = {"code": f"import subprocess; subprocess.run(['sleep', '{SECONDS}'])", "language": "python", "run_timeout": 60}
SERVE = [sys.executable, "-m", "recipe.sandbox"]
OF_THE_ENGINE = [sys.executable, "-m", "recipe.dag.cli", "sandbox", "serve"]
NUMPY = {"code": "import numpy; print(numpy.arange(3).sum())", "language": "python"}


@pytest.fixture
def serve(sandbox_level, env, tmp_path) -> Iterator[Callable]:
    """Return a function that starts a server in a fresh temporary directory and returns it with its address."""
    level = ["--isolation", sandbox_level["isolation"]]
    level += ["--allow-unsandboxed"] * sandbox_level.get("accept_unsandboxed", False)
    (tmp_path / "tmp").mkdir()
    started = []

    def start(*options: str, command: Sequence[str] = SERVE) -> tuple[subprocess.Popen, str]:
        command = [*command, *level, *options]
        variables = env | {"TMPDIR": str(tmp_path / "tmp"), "SECRET_KEY": "not for jobs"}
        with open(tmp_path / "log", "w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables)
        started.append(server)
        line = server.stdout.readline()
        assert line.startswith("sandbox at "), (tmp_path / "log").read_text()
        return server, line.split()[2].rstrip(":")

    yield start
    for server in started:
        if server.poll() is None:
            server.kill()
        server.wait()
        server.stdout.close()
    assert left_behind(tmp_path) == []


def left_behind(tmp_path: Path) -> list[str]:
    """Return the files of servers and processes of jobs that are left after a killed process tree had time to end."""

    def left() -> list[str]:
        return [*map(str, (tmp_path / "tmp").iterdir()), *sleepers(SECONDS)]

    until(lambda: not left())
    return left()


def run_cli(*options: str, env: dict[str, str], prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*prefix, *SERVE, *options], capture_output=True, text=True, env=env, timeout=60)


def log_of(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


@contextmanager
def running(url: str, jobs: int = 1, **options):
    """Start long jobs in the background; yield the futures of their answers once all of them run."""

    async def post(client: httpx.AsyncClient) -> httpx.Response | Exception:
        try:
            return await client.post("/run_code", json=LONG)
        except httpx.TransportError as error:
            return error

    loop = asyncio.new_event_loop()
    client = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, **options)
    tasks = [loop.create_task(post(client)) for _ in range(jobs)]

    async def started() -> None:
        while len(sleepers(SECONDS)) < jobs:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.02)

    try:
        loop.run_until_complete(started())
        yield lambda: loop.run_until_complete(asyncio.gather(*tasks))
    finally:
        loop.run_until_complete(client.aclose())
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


@pytest.mark.parametrize("command", [SERVE, OF_THE_ENGINE], ids=["alone", "verl-dag"])
def test_a_unix_socket_of_this_user_only(command, serve, over_socket, tmp_path):
    path = tmp_path / "s"
    server, where = serve("--socket", str(path), command=command)
    assert where == str(path) and stat.S_IMODE(path.stat().st_mode) == 0o600
    with over_socket(str(path)) as http:
        assert http.post("/run_code", json=NUMPY).json()["run_result"]["stdout"] == "3\n"
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0 and not path.exists()
    assert [line for line in log_of(tmp_path) if line["event"] == "request"][0]["client"] == f"pid {os.getpid()}"


@pytest.mark.parametrize("flag", ["--allow-unsandboxed", "--i-accept-unsandboxed"])  # the second is the old name
def test_a_regular_file_at_the_socket_path_is_not_replaced(flag, env, tmp_path):
    path = tmp_path / "data.parquet"
    path.write_text("precious")
    done = run_cli("--socket", str(path), "--isolation=rlimits", flag, env=env)
    assert done.returncode == 2 and "already in use" in done.stderr
    assert path.read_text() == "precious"


def test_the_socket_of_a_running_server_is_refused_and_a_dead_one_replaced(serve, over_socket, env, tmp_path):
    path = tmp_path / "s"
    first, _ = serve("--socket", str(path))
    env = env | {"TMPDIR": str(tmp_path / "tmp")}
    again = run_cli("--socket", str(path), "--isolation=rlimits", "--allow-unsandboxed", env=env)
    assert again.returncode == 2 and "another server listens there" in again.stderr
    with over_socket(str(path)) as http:
        assert http.get("/v1/ping").json() == "pong"
        first.kill()
        first.wait()
        serve("--socket", str(path))
        assert http.get("/v1/ping").json() == "pong"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0", "--no-token"], "it needs a token"),
        (["--isolation=rlimits", "--allow-unsandboxed", "--no-token"], "needs a token or --socket"),
        (["--no-token", "--token-file", "TOKEN"], "exclude each other"),
        (["--isolation", "rlimits"], "--allow-unsandboxed"),
        (["--token-file", "/nowhere/token"], "No such file"),
        (["--port", "65536"], "--port must be at least 0 and at most 65535"),
        (["--max-queue", "-1"], "--max-queue must be at least 0"),
        (["--memory-mb", "1"], "--memory-mb must be at least 16"),
        (["--host", "192.0.2.1", "--token-file", "TOKEN"], "cannot listen"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_options_are_refused_in_one_line(options, message, env, tmp_path, request):
    if "--token-file" in options:
        request.getfixturevalue("full_isolation")
    (tmp_path / "token").write_text("0123456789abcdef\n")
    options = [str(tmp_path / "token") if option == "TOKEN" else option for option in options]
    done = run_cli("--port", "0", "--quiet", *options, env=env | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.fixture
def without_namespaces(full_isolation) -> list[str]:
    """Return the prefix of a command that runs where user namespaces are forbidden: in one with a limit of 0."""
    forbid = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    forbid += ['echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*forbid, "true"], capture_output=True).returncode:
        pytest.skip("unshare: cannot forbid user namespaces here")
    return forbid


def test_where_namespaces_are_forbidden_it_ends_with_one_line(without_namespaces, env, tmp_path):
    done = run_cli("--port", "0", "--quiet", env=env | {"TMPDIR": str(tmp_path)}, prefix=without_namespaces)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "max_user_namespaces" in done.stderr and "--isolation=rlimits --allow-unsandboxed" in done.stderr
    code = (
        "import asyncio\nfrom recipe.dag.core.errors import UserError\n"
        "from recipe.dag.tools.sandbox import Sandbox\n"
        "try: asyncio.run(Sandbox.start())\nexcept UserError as error: print(error)"
    )
    command = [*without_namespaces, sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=env | {"TMPDIR": str(tmp_path)}, timeout=60)
    assert run.stdout.count("\n") == 1 and run.stderr == "" and "max_user_namespaces" in run.stdout
    assert "sandbox.isolation=rlimits sandbox.accept_unsandboxed=true" in run.stdout
    assert not any(tmp_path.iterdir())


def test_a_token_opens_other_addresses(serve, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\nsecond line\n")
    _, url = serve("--host", "0.0.0.0", "--port", "0", "--token-file", str(tmp_path / "token"))
    port = url.rsplit(":", 1)[1]
    for token, status in (("0123456789abcdef", 200), ("0123456789abcdeg", 401), ("second line", 401)):
        headers = {"Authorization": f"Bearer {token}", "Host": "any.example"}
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/ping", headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == status


def test_connections_without_a_complete_request_are_closed(monkeypatch, tmp_path):
    """Runs in this process, where the time-out can be shortened."""
    monkeypatch.setattr(serving, "_IDLE_S", 1.0)
    monkeypatch.setattr(serving.log, "set_up", lambda level: None)
    received = []

    def announce(facts: dict) -> None:
        def slow() -> None:
            try:
                with socket.create_connection(("127.0.0.1", facts["port"]), timeout=30) as connection:
                    connection.sendall(b"POST /run_code HTTP/1.1\r\nHost: local")
                    received.append(connection.recv(100))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=slow).start()

    options = serving.Options(port=0, isolation="rlimits", accept_unsandboxed=True, grace_s=0.1)
    serving.run(options, lambda: "", announce)
    assert received == [b""]


PROGRAM = {"code": "print(1)", "language": "python"}
WEB_PAGES = ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"})


def test_without_a_token_other_names_and_web_pages_are_refused(serve, full_isolation):
    _, url = serve("--port", "0", "--no-token")
    assert "@" not in url
    with httpx.Client(trust_env=False, timeout=60, base_url=url) as http:
        assert http.get("/v1/ping", headers={"Host": "rebound.example:80"}).status_code == 403
        assert http.get("/v1/ping", headers={"Host": "localhost:1"}).status_code == 200
        assert http.get("/v1/ping", headers={"Host": "[bad"}).status_code == 403
        for header in WEB_PAGES:
            assert http.post("/run_code", json=PROGRAM, headers=header).status_code == 403
            assert http.post("/sessions", headers=header).status_code == 403
        # What a page may send without asking: no Content-Type, or a plain one.
        for header in ({}, {"Content-Type": "text/plain"}):
            assert http.post("/run_code", content=json.dumps(PROGRAM), headers=header).status_code == 422


def test_the_token_is_new_and_printed_in_the_url(serve, tmp_path):
    _, url = serve("--port", "0")
    bare, token = httpx.URL(url).copy_with(userinfo=b""), httpx.URL(url).password
    other = serve("--port", "0")[1]
    assert len(token) >= 16 and token not in other
    basic = [base64.b64encode(f"{name}:{token}".encode()).decode() for name in ("token", "", "any name")]
    rights = [f"Bearer {token}", *(f"Basic {pair}" for pair in basic)]
    wrongs = ["", token, "Bearer", f"Bearer {token}x", "Basic", "Basic !", f"Basic {token}", f"Digest {basic[0]}"]
    with httpx.Client(trust_env=False, timeout=60, base_url=bare) as http:
        for sent in rights + wrongs:
            answer = http.get("/v1/ping", headers={"Authorization": sent})
            assert answer.status_code == (200 if sent in rights else 401), sent
            assert answer.json()
        for header in WEB_PAGES:  # a browser may add what it remembers of a URL
            assert (
                http.post("/run_code", json=PROGRAM, headers=header | {"Authorization": rights[1]}).status_code == 403
            )
    assert httpx.get(f"{url}/v1/ping", trust_env=False, timeout=60).json() == "pong"
    assert token not in (tmp_path / "log").read_text()


def test_a_flood_of_sessions_evicts_only_the_floods_own(serve):
    _, url = serve("--port", "0", "--max-sessions", "3", "--quiet")
    with httpx.Client(trust_env=False, timeout=60, base_url=url) as http:

        def create(client: str) -> httpx.Response:
            return http.post("/sessions", headers={"X-Client-Id": client})

        mine = create("me").json()["id"]
        theirs = [create("flood").json()["id"] for _ in range(20)]
        assert http.get(f"/sessions/{mine}").status_code == 200
        assert [http.get(f"/sessions/{session}").status_code for session in theirs] == [404] * 18 + [200] * 2
        # another address may not use the name of a client
        elsewhere = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), base_url=url, timeout=60)
        named = elsewhere.post("/sessions", headers={"X-Client-Id": "flood"})
        for late in (create("late"), named):
            assert late.status_code == 504 and "delete some" in late.json()["detail"]
        assert create("me").status_code == 201 and http.get(f"/sessions/{mine}").status_code == 404


def test_the_log_has_every_request_and_no_content(serve, tmp_path):
    server, url = serve("--port", "0")
    with httpx.Client(trust_env=False, base_url=url, timeout=60) as http:
        http.post(
            "/run_code", json={"code": "print('pri'+'vate')", "language": "python"}, headers={"X-Client-Id": "me"}
        )
        session = http.post("/sessions").json()["id"]
        http.put(f"/sessions/{session}/files/name-of-a-file", content=b"private")
        http.post("/run_code", content=b"private {", headers={"Content-Type": "application/json"})
        http.post("/run_code", json={"code": "private", "language": "go"})
        http.post("/run_code", content=b"private", headers={"Content-Encoding": "gzip"})
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(b"GET /private HTTP/1.1\r\nprivate\0\r\n\r\n")
        assert b'{"detail":' in connection.recv(65536)
    server.terminate()
    server.wait(60)
    text = (tmp_path / "log").read_text()
    for secret in ("private", "pri'", session, "name-of-a-file"):
        assert secret not in text
    lines = [line for line in log_of(tmp_path) if line["event"] == "request"]
    assert [(line["route"], line["http"], line["outcome"]) for line in lines] == [
        ("/run_code", 200, "Success"),
        ("/sessions", 201, None),
        ("/sessions/{id}/files/{name}", 201, None),
        ("/run_code", 422, None),
        ("/run_code", 200, "SandboxError"),
        ("/run_code", 415, None),
    ]
    assert {line["level"] for line in log_of(tmp_path)} == {"info"}
    assert lines[0]["client"] == "127.0.0.1 me" and lines[1]["client"] == "127.0.0.1" and lines[0]["seconds"] > 0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_it_ends_with_jobs_and_sessions(serve, end, tmp_path):
    server, url = serve("--port", "0", "--grace-s", "0.2")
    session = httpx.post(f"{url}/sessions", trust_env=False, timeout=60).json()["id"]
    httpx.put(f"{url}/sessions/{session}/files/f", content=b"x", trust_env=False, timeout=60)
    assert list((tmp_path / "tmp").iterdir())
    with running(url, jobs=3):
        server.send_signal(end)
        server.wait(60)
        assert left_behind(tmp_path) == []


def test_graceful_stop_lets_running_jobs_finish_and_refuses_the_rest(serve):
    server, url = serve("--port", "0", "--max-concurrent", "1", "--grace-s", "30")

    async def scenario() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            body = {"code": "import time; time.sleep(5); print('whole')", "language": "python"}
            answers = [asyncio.create_task(http.post("/run_code", json=body)) for _ in range(2)]
            while [(status := (await http.get("/v1/status")).json())[key] for key in ("running", "queue")] != [1, 1]:
                assert not any(answer.done() for answer in answers), status
                await asyncio.sleep(0.02)
            server.terminate()
            return await asyncio.gather(*answers)

    first, second = sorted(asyncio.run(scenario()), key=lambda answer: answer.status_code)
    assert first.json()["run_result"]["stdout"] == "whole\n"
    assert second.status_code == 504 and "stopping" in second.json()["detail"]
    assert server.wait(60) == 0


def test_jobs_see_nothing_of_the_server(serve, full_isolation):
    _, url = serve("--port", "0")
    code = (
        "import glob, os\nprint(dict(os.environ))\nfor path in glob.glob('/proc/[0-9]*/*'):\n"
        "    try: print(open(path, errors='replace').read())\n    except OSError: pass"
    )
    answer = httpx.post(
        f"{url}/run_code", json={"code": code, "language": "python"}, trust_env=False, timeout=60
    ).json()
    seen = answer["run_result"]["stdout"]
    assert "PATH" in seen and "SECRET_KEY" not in seen and "sandbox\0serve" not in seen


def test_500_at_once_are_answered_and_the_next_call_too(serve):
    _, url = serve("--port", "0", "--max-concurrent", "4", "--max-queue", "50", "--quiet")

    async def scenario() -> list[int]:
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=500)) as http:

            async def one() -> int:
                async with http.post("/run_code", json={"code": "print(1)", "language": "python"}) as answer:
                    if answer.status == 504:
                        assert answer.headers["Retry-After"] == "1"
                    else:
                        assert (await answer.json())["run_result"]["stdout"] == "1\n"
                    return answer.status

            codes = await asyncio.gather(*(one() for _ in range(500)))
            async with http.get("/v1/status") as answer:
                status = await answer.json()
            assert (status["running"], status["queue"]) == (0, 0)
            started = time.monotonic()
            assert await one() == 200
            assert time.monotonic() - started < 20
            return codes

    codes = asyncio.run(scenario())
    assert set(codes) == {200, 504} and codes.count(200) >= 54
