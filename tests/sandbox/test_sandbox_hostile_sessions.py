"""Programs that attack their own session: its quota, its routes, its next call and its end, on a server of this user
and on one of an ordinary user, which the modes of files stop."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from recipe.sandbox import descent
from recipe.sandbox.launch import LocalSandbox
from tests.sandbox.processes import alive, until

ORDINARY = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]


def start(monkeypatch, tmp_path, prefix: list[str]) -> LocalSandbox:
    """Start a server by a command that starts with `prefix`."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(prefix)} {sys.executable} "$@"\n')
    python.chmod(0o755)
    sandbox = LocalSandbox(max_concurrent=2)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        asyncio.run(sandbox.start())
    return sandbox


@pytest.fixture(scope="module", params=["this user", "ordinary user"])
def server(request, full_isolation, tmp_path_factory, caller):
    prefix = [] if request.param == "this user" else ORDINARY
    if prefix and (shutil.which("unshare") is None or subprocess.run([*prefix, "true"]).returncode):
        pytest.skip("unshare cannot map a user")
    sandbox = start(pytest.MonkeyPatch(), tmp_path_factory.mktemp("server"), prefix)
    yield caller(sandbox)
    sandbox.close()


@pytest.fixture
def session(server):
    made = []

    def make(**options) -> str:
        made.append(server("POST", "/sessions", options).json()["id"])
        return made[-1]

    yield make
    for identifier in made:
        server("DELETE", f"/sessions/{identifier}")


FILL = {
    "locked": "import os\nos.makedirs('d/e'); open('d/e/f', 'w').close(); os.chmod('d/e', 0); os.chmod('d', 0)\n"
    "os.chmod('.', 0)",
    "deep": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()",
    "wide": "try:\n  for n in range(400_000): open(f'f{n}', 'x').close()\n"
    "except OSError as error: print(n, error.errno)",
    "full": "try: open('big', 'wb').write(bytes(64 << 20))\nexcept OSError as error: print(error.errno)",
    "gone": "import os, shutil\nopen('f', 'w').close()\nshutil.rmtree('.', ignore_errors=True)",
}


@pytest.mark.parametrize("how", FILL)
def test_no_program_can_break_the_next_call_or_the_routes_of_its_session(server, session, how):
    mine = session(quota_mb=48)
    filled = server.run(FILL[how], session_id=mine, run_timeout=30)
    assert filled["status"] == "Success", filled
    described = server("GET", f"/sessions/{mine}").json()
    assert described["used_bytes"] <= described["quota_bytes"] and len(described["files"]) <= 1000
    assert server.stdout("print(6 * 7)", session_id=mine) == "42\n"
    base = f"/sessions/{mine}/files"
    assert server("PUT", f"{base}/new", b"x").status_code == (507 if how in ("wide", "full") else 201)
    for name in ("d", "big", *(f"f{n}" for n in range(3))):
        assert server("GET", f"{base}/{name}").status_code in (200, 404, 409, 413)
        assert server("DELETE", f"{base}/{name}").status_code in (200, 404)
    assert server("PUT", f"{base}/new", b"x").status_code == 201
    assert server.run("open('more', 'w').write('x')", session_id=mine)["status"] == "Success"
    assert server("GET", f"{base}/more").content == b"x"


@pytest.mark.parametrize(
    "code", [FILL["full"], FILL["wide"], "import os; os.mkfifo('new')", "import os; os.mkdir('new')"]
)
def test_files_that_the_session_cannot_take_fail_the_call(server, session, code):
    mine = session(quota_mb=48)
    server.run(code, session_id=mine, run_timeout=30)
    answer = server.run("print(1)", session_id=mine, files={"new": "eA=="})
    assert answer["status"] == "Failed" and "[sandbox] files: 'new'" in answer["run_result"]["stderr"], answer
    assert server.run("print(1)", session_id=mine, files={"new": "not base64!"})["status"] == "SandboxError"


def test_the_number_of_files_is_limited(server, session):
    number, error = server.stdout(FILL["wide"], session_id=session(quota_mb=48), run_timeout=30).split()
    assert int(number) == 3071 and error == "28"


def test_unlinked_files_count_for_the_quota(server, session):
    mine = session(quota_mb=16)
    code = (
        "import os\nopened = []\ntry:\n  for n in range(200):\n    opened.append(open('f', 'wb', buffering=0))\n"
        "    os.unlink('f')\n"
        "    opened[-1].write(bytes(1 << 20))\nexcept OSError as error: print(n, error.errno)"
    )
    for _ in range(2):  # what one call held is free for the next
        number, error = server.stdout(code, session_id=mine).split()
        assert 14 <= int(number) <= 16 and error == "28"
    assert server("GET", f"/sessions/{mine}").json()["used_bytes"] == 0


def test_expired_sessions_are_removed_whatever_is_in_them(server):
    for code in FILL.values():
        expiring = server("POST", "/sessions", {"ttl": 3, "quota_mb": 48}).json()["id"]
        assert server.run(code, session_id=expiring, run_timeout=30)["status"] == "Success"
    gone = {"open": 0, "used_bytes": 0}
    assert until(lambda: server("GET", "/v1/status").json()["sessions"] == gone, 30)


def test_a_reader_is_not_stopped_by_a_locked_root(server, session):
    theirs = session()
    server.run("import os; open('f', 'w').write('shared'); os.chmod('.', 0)", session_id=theirs)
    assert server.stdout("print(open('/in/a/f').read())", share={"a": theirs}) == "shared\n"


def test_sessions_end_with_a_server_that_is_killed(full_isolation, monkeypatch, tmp_path, caller):
    """Every process that holds their file systems dies."""
    sandbox = start(monkeypatch, tmp_path, [])
    try:
        call = caller(sandbox)
        mine = call("POST", "/sessions").json()["id"]
        call.run("open('big', 'wb').write(bytes(8 << 20))", session_id=mine)
        family = descent.descendants(sandbox.pid)
        stores = [pid for pid in family if "tmpfs /tmp/" in mounts(pid)]
        assert stores
        os.kill(sandbox.pid, signal.SIGKILL)
        assert until(lambda: not alive(family), 30)
    finally:
        sandbox.close()


def mounts(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/mounts") as file:
        return file.read()
    return ""  # it has ended
