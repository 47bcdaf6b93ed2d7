"""Infrastructure that fails is retried or a fault; code that fails is a result. Stub servers and a real one, on
loopback.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from urllib.parse import quote

import pytest
from aiohttp import web

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.tools.sandbox_client import RunResult, SandboxClient, check_sandbox
from recipe.dag.tools.sandbox_transport import split
from recipe.sandbox.launch import LocalSandbox
from tests.tools.sandbox_stub import Handler, always, finished, serving, with_stub


def run(handler: Handler, **options) -> RunResult:
    return with_stub(handler, lambda client: client.run_code("x", timeout_s=0.1), **options)


TIMED_OUT = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "so far", "stderr": None}
TIMED_OUT |= {"execution_time": 2.0}
NOT_COMPILED = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "no", "execution_time": 0.5}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (finished("out"), ("success", "out", "", 0, 0.25)),
        (finished(stderr="Traceback", code=1), ("failed", "", "Traceback", 1, 0.25)),
        (finished(code=-9), ("failed", "", "", -9, 0.25)),
        (finished("a\ud800b"), ("success", "a?b", "", 0, 0.25)),
        ({"status": "Failed", "run_result": TIMED_OUT}, ("timeout", "so far", "", None, 2.0)),
        ({"status": "Failed", "run_result": None, "compile_result": NOT_COMPILED}, ("failed", "", "no", 1, 0.5)),
    ],
)
def test_outcomes_of_code_are_results(answer, expected):
    result = run(always(answer))
    assert (result.status, result.stdout, result.stderr, result.return_code, result.seconds) == expected
    assert result.attempts == 1


@pytest.mark.parametrize(
    ("handler", "message", "tries"),
    [
        (always(finished(), status=503), "HTTP 503", 3),
        (always(finished(), status=429), "HTTP 429", 3),
        (always({"status": "SandboxError", "message": "no disk"}), "SandboxError: no disk", 3),
        (always(text="<html>", status=200), "unreadable answer", 3),
        (always([]), "unreadable answer", 3),
        (always({"status": "Success", "run_result": None}), "unreadable answer", 3),
        (always(finished() | {"status": "Wonderful"}), "unreadable answer", 3),
        (always({"status": "Success", "run_result": TIMED_OUT | {"status": "Error"}}), "unreadable answer", 3),
        (always({"status": "Success", "run_result": NOT_COMPILED | {"stdout": 5}}), "unreadable answer", 3),
        # what would recur is not repeated, and a redirect is not followed
        (always({"detail": "no"}, status=422), "HTTP 422", 1),
        (always(status=302, headers={"Location": "/run_code"}), "HTTP 302", 1),
    ],
)
def test_infrastructure_failures_end_in_a_fault_after_bounded_tries(handler, message, tries):
    calls = []

    async def counting(request: web.Request) -> web.StreamResponse:
        calls.append(request)
        return await handler(request)

    with pytest.raises(SandboxFault, match=message) as caught:
        run(counting, retries=2)
    assert caught.value.infra and len(calls) == tries


def test_a_server_that_hangs_is_a_fault():
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    with pytest.raises(SandboxFault, match="ReadTimeout"):
        run(hang, retries=1, margin_s=0.1)


def test_results_are_the_same_if_every_tenth_call_fails():
    """With 503, hanging, garbage and dropped connections in turn, all 200 answers are right and retries are counted."""
    seen, broken = 0, 0

    async def flaky(request: web.Request) -> web.StreamResponse:
        nonlocal seen, broken
        seen += 1
        if seen % 10 == 0:
            broken += 1
            if broken % 4 == 0:
                return web.Response(status=503)
            if broken % 4 == 1:
                await asyncio.sleep(60)
            if broken % 4 == 2:
                return web.Response(text='{"status": "Succ')
            request.transport.abort()
        return web.json_response(finished(stdout=(await request.json())["code"]))

    async def scenario() -> list:
        async with serving(flaky) as url:
            client = SandboxClient(url, max_concurrent=16, margin_s=1.4, retries=9)
            try:
                return await asyncio.gather(*(client.run_code(f"code {n}", timeout_s=0.1) for n in range(200)))
            finally:
                await client.close()

    results = asyncio.run(scenario())
    assert [result.stdout for result in results] == [f"code {n}" for n in range(200)]
    assert broken >= 20
    assert sum(result.attempts - 1 for result in results) == seen - 200 == broken


def test_no_more_than_max_concurrent_at_once():
    now, most = 0, 0

    async def slow(_request: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        async with asyncio.timeout(60):
            while most < 3:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        now -= 1
        return web.json_response(finished())

    async def scenario() -> None:
        async with serving(slow) as url:
            client = SandboxClient(url, max_concurrent=3)
            await asyncio.gather(*(client.run_code("x") for _ in range(30)))
            await client.close()

    asyncio.run(scenario())
    assert most == 3


def test_the_request_has_sandboxfusions_fields():
    bodies = []

    async def keep(request: web.Request) -> web.Response:
        bodies.append((request.headers["Authorization"], await request.json()))
        return web.json_response(finished())

    async def scenario() -> None:
        async with serving(keep) as url:
            client = SandboxClient(url + "/run_code/", token="t")
            await client.run_code("x", timeout_s=3, stdin="in\udc80", files={"a": b"hi"}, memory_mb=99)
            await client.close()

    asyncio.run(scenario())
    authorization, body = bodies[0]
    assert authorization == "Bearer t"
    assert body.pop("compile_timeout") > 0
    program = {"code": "x", "language": "python", "run_timeout": 3, "memory_limit_MB": 99}
    assert body == program | {"stdin": "in?", "files": {"a": "aGk="}}


def test_recovery_is_shared_and_precedes_the_next_try():
    recoveries = 0

    async def scenario() -> list:
        nonlocal recoveries
        async with serving(always(finished("late"))) as url:
            client: SandboxClient

            async def recover() -> None:
                nonlocal recoveries
                recoveries += 1
                await asyncio.sleep(0.2)
                client.transport.url = url

            client = SandboxClient("http://127.0.0.1:1", on_unreachable=recover)
            try:
                return await asyncio.gather(*(client.run_code("x") for _ in range(10)))
            finally:
                await client.close()

    results = asyncio.run(scenario())
    assert {(result.stdout, result.attempts) for result in results} == {("late", 2)}
    assert recoveries == 1


def test_recovery_that_fails_ends_in_the_fault_itself():
    async def recover() -> None:
        raise SandboxFault("cannot start")

    client = SandboxClient("http://127.0.0.1:1", retries=1, on_unreachable=recover)
    with pytest.raises(SandboxFault, match=r"ConnectError.*2 tries"):
        asyncio.run(client.run_code("x"))


def test_local_server_killed_in_the_middle_is_restarted_and_every_call_succeeds(sandbox_level):
    async def scenario() -> tuple[list, int]:
        local = LocalSandbox(max_concurrent=4, **sandbox_level)
        client = SandboxClient(await local.start(), max_concurrent=32, token=local.token, on_unreachable=local.ensure)
        try:
            calls = [
                asyncio.create_task(client.run_code(f"import time; time.sleep(0.1); print({n})")) for n in range(32)
            ]
            while not any(call.done() for call in calls):
                await asyncio.sleep(0.01)
            os.kill(local.pid, signal.SIGKILL)
            return await asyncio.gather(*calls), local.restarts
        finally:
            await client.close()
            await local.stop()

    results, restarts = asyncio.run(scenario())
    assert [(result.status, result.stdout) for result in results] == [("success", f"{n}\n") for n in range(32)]
    assert restarts == 1
    assert max(result.attempts for result in results) > 1


def test_one_client_serves_several_event_loops_in_turn(sandbox_level):
    local = LocalSandbox(**sandbox_level)
    try:
        client = SandboxClient(asyncio.run(local.start()), token=local.token, on_unreachable=local.ensure)

        async def once(n: int) -> str:
            result = await client.run_code(f"print({n})")
            assert await client.ping()
            await client.close()
            return result.stdout

        assert [asyncio.run(once(n)) for n in range(3)] == ["0\n", "1\n", "2\n"]
    finally:
        local.close()
    assert asyncio.run(client.ping()) is False


@pytest.mark.parametrize("code", ["print('\ud800')", "\udfff"])
def test_lone_surrogates_fail_without_a_server(code):
    result = asyncio.run(SandboxClient("http://127.0.0.1:1").run_code(code))
    assert (result.status, result.return_code) == ("failed", 1)
    assert "lone surrogate" in result.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no url at all", "http://[bad"])
def test_check_names_the_url_and_the_fix(url):
    with pytest.raises(UserError, match=r"drop sandbox\.url") as caught:
        asyncio.run(check_sandbox(url))
    assert url in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1/run_code/", ("http://h:1", None)),
        ("http://token:a%2Fb@h:1/x@y:z/run_code", ("http://h:1/x@y:z", "a/b")),
        ("http://name@[::1]:1/", ("http://[::1]:1", None)),
        ("http+unix://%2Ftmp%2Fa%40b/run_code", ("http+unix://%2Ftmp%2Fa%40b", None)),
        ("no url at all", ("no url at all", None)),
    ],
)
def test_urls_are_split_into_the_root_and_the_token(url, expected):
    assert split(url) == expected


def test_a_server_behind_a_socket_or_with_the_token_in_its_url():
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(finished(request.headers["Authorization"] + request.headers["Host"]))

    async def scenario() -> list[str]:
        outputs = []
        async with serving(answer) as url:
            client = SandboxClient(url.replace("http://", "http://token:secret@"))
            outputs.append((await client.run_code("x")).stdout)
            assert "secret" not in client.url
            await client.close()
        with tempfile.TemporaryDirectory() as folder:
            async with serving(answer, socket=f"{folder}/a@b"):
                client = SandboxClient(f"http+unix://{quote(folder, safe='')}%2Fa%40b", token="t")
                outputs.append((await client.run_code("x")).stdout)
                await client.close()
            with pytest.raises(SandboxFault, match=r"ConnectError.*1 try"):
                await SandboxClient(f"http+unix://{quote(folder, safe='')}%2Fgone", retries=0).run_code("x")
        return outputs

    tcp, unix = asyncio.run(scenario())
    assert tcp.startswith("Bearer secret127.0.0.1:") and unix == "Bearer tlocalhost"


def test_check_accepts_a_real_one_and_refuses_a_wrong_token_and_other_servers(local):
    async def other() -> None:
        async with serving(always(finished())) as url:
            await check_sandbox(url)

    asyncio.run(check_sandbox(local.url + "/run_code", token=local.token))
    with pytest.raises(UserError, match="HTTP 401"):
        asyncio.run(check_sandbox(local.url, token="wrong"))
    with pytest.raises(UserError, match="HTTP 404"):
        asyncio.run(other())
