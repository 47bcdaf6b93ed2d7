"""Sessions behind the Landlock wall: folders that are handed from one program's user to the next."""

from __future__ import annotations

import asyncio
import sys

import pytest

from recipe.sandbox.launch import LocalSandbox
from tests.sandbox.jail.elsewhere import REPOSITORY, python_for_landlock


@pytest.fixture(scope="module")
def call(caller):
    python = python_for_landlock()
    packages = [path for path in sys.path if path.endswith("-packages")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python)
        patch.setattr(sys, "path", [str(REPOSITORY), *packages])
        local = LocalSandbox(max_concurrent=4, isolation="landlock")
        asyncio.run(local.start())
    assert local.isolation == "landlock"
    yield caller(local)
    root = local.root
    local.close()
    assert not root.exists()


@pytest.fixture
def session(call):
    number = call("POST", "/sessions", {"quota_mb": 4}).json()["id"]
    yield number
    assert call("DELETE", f"/sessions/{number}").status_code == 200


def test_files_pass_from_program_to_program_and_to_the_client(call, session):
    assert call("PUT", f"/sessions/{session}/files/in.txt", b"given").status_code == 201
    code = (
        "import os; text = open('in.txt').read(); os.mkdir('d')\n"
        "f = os.open('d/out', os.O_CREAT | os.O_WRONLY, 0o600); os.write(f, text.encode()); print(os.getuid())"
    )
    first = call.run(code, session_id=session)
    assert first["status"] == "Success", first
    code = "import os; print(os.getuid()); open('d/out', 'a').write(' twice'); os.remove('in.txt')"
    second = call.run(code, session_id=session)
    assert second["status"] == "Success" and second["run_result"]["stdout"] != first["run_result"]["stdout"]
    assert call("GET", f"/sessions/{session}/files/d/out").content == b"given twice"
    assert call("GET", f"/sessions/{session}/files/in.txt").status_code == 404


@pytest.mark.parametrize(
    "code",
    ["import os; os.chmod('.', 0)", "import os; os.mkdir('locked'); open('locked/x', 'w'); os.chmod('locked', 0)"],
    ids=["locked root", "locked folder"],
)
def test_a_program_cannot_break_its_session(call, session, code):
    assert call.run(code, session_id=session)["status"] == "Success"
    assert call.stdout("print(1)", session_id=session) == "1\n"
    assert call("GET", f"/sessions/{session}").status_code == 200


def test_folders_too_deep_to_measure_count_as_full(call, session):
    deep = call.run("import os\nfor n in range(1500): os.mkdir('d'); os.chdir('d')", session_id=session)
    assert "the session is full" in deep["run_result"]["stderr"]
    assert call("GET", f"/sessions/{session}").status_code == 200
    assert call("DELETE", f"/sessions/{session}/files/d").status_code == 200
    assert call.stdout("print(1)", session_id=session) == "1\n"


def test_the_quota_is_measured(call, session):
    full = call.run("open('big', 'wb').write(bytes(8 << 20))", session_id=session)
    assert "the session is full" in full["run_result"]["stderr"]
    body = {"code": "print(1)", "language": "python", "session_id": session}
    assert call("POST", "/run_code", body).status_code == 507
    assert call("DELETE", f"/sessions/{session}/files/big").status_code == 200
    assert call.stdout("print(1)", session_id=session) == "1\n"


def test_sessions_of_others_are_out_of_reach(call, session):
    other = call("POST", "/sessions", {}).json()["id"]
    call("PUT", f"/sessions/{other}/files/secret", b"secret")
    code = (
        "import glob, os\nabove = os.path.dirname(os.getcwd())\n"
        "for attempt in (lambda: os.listdir(above), lambda: glob.glob(above + '/*/secret')[0]):\n"
        "  try: print('got', attempt())\n  except (OSError, IndexError): print('held')"
    )
    assert call.stdout(code, session_id=session) == "held\nheld\n"
