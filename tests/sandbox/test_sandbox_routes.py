"""The server over real HTTP: SandboxFusion's answers, and this server's own routes."""

from __future__ import annotations

import asyncio
import base64
import shutil
import time

import pytest

from recipe.sandbox import toolchain
from recipe.sandbox.outcome import SandboxError


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_answer_has_sandboxfusions_shape(call):
    answer = call.run("print(6 * 7)", session="unknown fields are ignored", run_timeout="5")
    assert answer["run_result"].pop("execution_time") > 0
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": ""},
        "executor_pod_name": None,
        "files": {},
    }


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        ("1/0", {}, ("Failed", "Finished", 1)),
        ("def", {}, ("Failed", "Finished", 1)),
        ("import os; os._exit(7)", {}, ("Failed", "Finished", 7)),
        ("import os; os.kill(os.getpid(), 11)", {}, ("Failed", "Finished", -11)),
        ("import os; os.abort()", {}, ("Failed", "Finished", -6)),
        ("import time; time.sleep(60)", {"run_timeout": 0.3}, ("Failed", "TimeLimitExceeded", None)),
        ("print(1)", {"run_timeout": 0}, ("Failed", "TimeLimitExceeded", None)),
        ("print(1)", {"run_timeout": -1}, ("Failed", "TimeLimitExceeded", None)),
        ("print(1)", {"run_timeout": 1e18}, ("Success", "Finished", 0)),
        ("exit 3", {"language": "bash"}, ("Failed", "Finished", 3)),
    ],
)
def test_status_rules(call, code, fields, expected):
    answer = call.run(code, **fields)
    run = answer["run_result"]
    assert (answer["status"], run["status"], run["return_code"]) == expected
    assert answer["message"] == "" and answer["compile_result"] is None


def test_timeout_keeps_what_was_printed_and_the_files(call):
    code = "import time; open('f', 'w').write('hi'); print('so far', flush=True); time.sleep(60)"
    for run_timeout in (1, 30):  # a busy machine may not have started it within a second
        answer = call.run(code, run_timeout=run_timeout, fetch_files=["f"])
        if answer["run_result"]["stdout"]:
            break
    assert answer["run_result"]["stdout"] == "so far\n" and answer["files"] == {"f": encoded("hi")}
    assert 0.9 < answer["run_result"]["execution_time"] - run_timeout + 1 < 10


def test_stdin_files_and_patterns(call):
    code = "import sys; open('out.csv', 'w').write(open('d/in').read() + sys.stdin.read())"
    answer = call.run(
        code, stdin="typed", files={"d/in": encoded("given "), "skipped": None}, fetch_files=["*.csv", "none"]
    )
    assert answer["status"] == "Success", answer
    assert answer["files"] == {"out.csv": encoded("given typed")}
    assert call.stdout("import sys; print(repr(sys.stdin.read()))") == "''\n"


def test_output_that_is_not_utf8_is_replaced_by_one_message(call):
    run = call.run("import sys; sys.stdout.buffer.write(b'ok\\xff'); print('fine', file=sys.stderr)")["run_result"]
    assert run["stdout"] == "[DecodeError] 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"
    assert run["stderr"] == "fine\n"


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_cpp(call):
    good = call.run('#include <cstdio>\nint main() { puts("hi"); }', language="cpp")
    assert good["status"] == "Success" and good["compile_result"]["return_code"] == 0
    assert good["run_result"]["stdout"] == "hi\n"
    bad = call.run("int main() { return nothing; }", language="cpp")
    assert bad["status"] == "Failed" and bad["run_result"] is None and bad["compile_result"]["return_code"] == 1


def test_a_language_without_a_runner_is_a_sandbox_error(call):
    answer = call.run("x", language="go")
    assert answer["status"] == "SandboxError" and "'go' has no runner" in answer["message"]
    assert answer["message"].startswith("exception on running code x: ")
    assert answer["run_result"] is answer["compile_result"] is None


def test_pytest(call):
    code = "def test_good(tmp_path): pass\ndef test_bad(): assert 1 == 2\n"
    answer = call.run(code, language="pytest", run_timeout=30)
    assert answer["status"] == "Failed" and answer["run_result"]["return_code"] == 1
    assert "1 failed, 1 passed" in answer["run_result"]["stdout"]
    answer = call.run(
        code, language="pytest", run_timeout=30, args=["-k", "good", "--junitxml=r.xml"], fetch_files=["r.xml"]
    )
    assert answer["status"] == "Success" and answer["compile_result"] is None
    assert b'tests="1"' in base64.b64decode(answer["files"]["r.xml"])


def test_pytest_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(SandboxError, match="pytest is not installed"):
        toolchain.interpreter("pytest", "x.py")


def test_memory_limit_of_the_request_is_enforced(call):
    answer = call.run("bytearray(300 << 20)", memory_limit_MB=200)
    assert answer["status"] == "Failed" and answer["run_result"]["return_code"] in (1, -9)
    assert call.run("bytearray(300 << 20)", memory_limit_MB=-1)["status"] == "Success"


def test_other_routes(call):
    assert call("GET", "/v1/ping").json() == "pong"
    assert call("GET", "/list_datasets").json() == []
    for path in ("/list_ids", "/get_prompts", "/get_prompt_by_id", "/get_metrics", "/get_metrics_function"):
        answer = call("POST", path, {"dataset": "x", "config": {}})
        assert answer.status_code == 400 and "stores no datasets" in answer.json()["detail"]
    assert call("GET", "/run_code").status_code == 405
    assert call("GET", "/health").status_code == 404
    assert call("GET", "/health").json() == {"detail": "Not Found"}


def test_status_and_the_isolation_of_every_answer(call, local):
    status = call("GET", "/v1/status").json()
    assert status["isolation"] == local.isolation
    assert (status["running"], status["queue"], status["max_concurrent"]) == (0, 0, 8)
    assert status["sessions"].keys() == {"open", "used_bytes"} and status["limits"]["memory_mb"] == 1024
    for answer in (call("GET", "/v1/ping"), call("GET", "/nowhere"), call("POST", "/run_code", b"{")):
        assert answer.headers["X-Sandbox-Isolation"] == local.isolation


def test_without_the_token_nothing_is_answered(local, over_socket):
    with over_socket(local.socket) as http:
        for path in ("/run_code", "/sessions", "/submit"):
            assert http.post(path, json={"code": "1", "language": "python"}).status_code == 401
        wrong = {"Authorization": "Bearer \u00e9".encode()}
        assert http.get("/v1/ping", headers=wrong).status_code == http.get("/v1/status").status_code == 401


def test_submit_judges_provided_data(call):
    cases = [{"input": {"stdin": n}, "output": {"stdout": str(float(n) ** 2)}} for n in ("2", "3")]
    body = {
        "dataset": "any",
        "id": 1,
        "completion": "```python\nprint(int(input()) ** 2)\n```",
        "config": {"dataset_type": "CommonOJDataset", "language": "python", "provided_data": {"test": cases}},
    }
    result = call("POST", "/submit", body).json()
    assert result["accepted"] and [test["passed"] for test in result["tests"]] == [True, True]
    assert result["tests"][0]["exec_info"]["status"] == "Success"
    assert not call("POST", "/submit", body | {"completion": "print(4)"}).json()["accepted"]


def test_hanging_up_kills_the_job(call):
    async def scenario() -> None:
        body = {"code": "import time; time.sleep(60)", "language": "python", "run_timeout": 60}
        async with call.connect() as http:
            job = asyncio.create_task(http.post("/run_code", json=body))
            while (await http.get("/v1/status")).json()["running"] != 1:
                await asyncio.sleep(0.02)
            job.cancel()
            started = time.monotonic()
            while (await http.get("/v1/status")).json()["running"]:
                await asyncio.sleep(0.02)
            assert time.monotonic() - started < 20

    asyncio.run(scenario())
    assert call.stdout("print('next')") == "next\n"
