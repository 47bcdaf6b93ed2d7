"""Infrastructure that fails is retried or a fault; code that fails is a result. Stub servers and a real one, on
loopback.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest
from aiohttp import web

from recipe.dag.errors import SandboxFault, UserError
from recipe.dag.sandbox.launch import LocalSandbox
from recipe.dag.tools import sandbox_transport
from recipe.dag.tools.sandbox_client import SandboxClient, check_sandbox
from recipe.dag.tools.sandbox_transport import split

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(sandbox_transport, "_MAX_PAUSE_S", 0.02)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/run_code", handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def finished(stdout: str = "", stderr: str = "", code: int = 0) -> dict:
    run = {"status": "Finished", "return_code": code, "stdout": stdout, "stderr": stderr, "execution_time": 0.25}
    return {
        "status": "Failed" if code else "Success",
        "message": "",
        "compile_result": None,
        "run_result": run,
        "files": {},
    }


async def with_stub(handler: Handler, code: str = "x", **options):
    async with serving(handler) as url:
        client = SandboxClient(url, **options)
        try:
            return await client.run_code(code, timeout_s=0.1)
        finally:
            await client.close()


def always(answer: dict | None = None, **options) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response(answer, **options) if answer is not None else web.Response(**options)

    return handler


TIMED_OUT = {
    "status": "TimeLimitExceeded",
    "return_code": None,
    "stdout": "so far",
    "stderr": None,
    "execution_time": 2.0,
}
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
    result = asyncio.run(with_stub(always(answer)))
    assert (result.status, result.stdout, result.stderr, result.return_code, result.seconds) == expected
    assert result.attempts == 1


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (always(finished(), status=503), "HTTP 503"),
        (always(finished(), status=429), "HTTP 429"),
        (always({"status": "SandboxError", "message": "no disk"}), "SandboxError: no disk"),
        (always(text="<html>", status=200), "unreadable answer"),
        (always([]), "unreadable answer"),
        (always({"status": "Success", "run_result": None}), "unreadable answer"),
        (always(finished() | {"status": "Wonderful"}), "unreadable answer"),
        (always({"status": "Success", "run_result": TIMED_OUT | {"status": "Error"}}), "unreadable answer"),
        (always({"status": "Success", "run_result": NOT_COMPILED | {"stdout": 5}}), "unreadable answer"),
    ],
)
def test_infrastructure_failures_end_in_a_fault_after_bounded_tries(handler, message):
    calls = []

    async def counting(request: web.Request) -> web.StreamResponse:
        calls.append(request)
        return await handler(request)

    with pytest.raises(SandboxFault, match=message) as caught:
        asyncio.run(with_stub(counting, retries=2))
    assert caught.value.infra and len(calls) == 3


def test_a_refused_request_is_not_retried():
    calls = []

    async def refuse(request: web.Request) -> web.Response:
        calls.append(request)
        return web.json_response({"detail": "no"}, status=422)

    with pytest.raises(SandboxFault, match="HTTP 422"):
        asyncio.run(with_stub(refuse))
    assert len(calls) == 1


def test_a_redirect_is_not_followed():
    calls = []

    async def redirect(request: web.Request) -> web.Response:
        calls.append(request)
        raise web.HTTPFound("/run_code")

    with pytest.raises(SandboxFault, match="HTTP 302"):
        asyncio.run(with_stub(redirect))
    assert len(calls) == 1


def test_a_client_that_was_not_closed_gives_no_warning_when_its_loop_ends(caplog):
    async def scenario(client: SandboxClient) -> str:
        async with serving(always(finished("out"))) as client.transport.url:
            return (await client.run_code("x")).stdout

    client = SandboxClient("none")
    assert [asyncio.run(scenario(client)) for _ in range(2)] == ["out", "out"]
    del client
    gc.collect()
    assert not caplog.records


def test_a_server_that_hangs_is_a_fault():
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    with pytest.raises(SandboxFault, match="ReadTimeout"):
        asyncio.run(with_stub(hang, retries=1, margin_s=0.1))


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
    assert body == {
        "code": "x",
        "language": "python",
        "run_timeout": 3,
        "memory_limit_MB": 99,
        "stdin": "in?",
        "files": {"a": "aGk="},
    }


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


def test_check_refuses_a_server_that_is_not_a_sandbox():
    async def scenario() -> None:
        async with serving(always(finished())) as url:
            await check_sandbox(url)

    with pytest.raises(UserError, match="HTTP 404"):
        asyncio.run(scenario())


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
            app = web.Application()
            app.router.add_post("/run_code", answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.UnixSite(runner, f"{folder}/a@b").start()
            client = SandboxClient(f"http+unix://{quote(folder, safe='')}%2Fa%40b", token="t")
            outputs.append((await client.run_code("x")).stdout)
            await client.close()
            await runner.cleanup()
            with pytest.raises(SandboxFault, match=r"ConnectError.*1 tries"):
                await SandboxClient(f"http+unix://{quote(folder, safe='')}%2Fgone", retries=0).run_code("x")
        return outputs

    tcp, unix = asyncio.run(scenario())
    assert tcp.startswith("Bearer secret127.0.0.1:") and unix == "Bearer tlocalhost"


def test_check_accepts_a_real_one_and_notices_a_wrong_token(sandbox_level):
    async def scenario() -> None:
        local = LocalSandbox(**sandbox_level)
        try:
            await check_sandbox(await local.start() + "/run_code", token=local.token)
            with pytest.raises(UserError, match="HTTP 401"):
                await check_sandbox(local.url, token="wrong")
        finally:
            await local.stop()

    asyncio.run(scenario())
