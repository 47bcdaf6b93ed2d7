"""Invalid requests of every known kind: the answer is the documented one, and the server keeps working."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from contextlib import suppress

import httpx
import pytest

from recipe.sandbox import body

GOOD = {"code": "print('alive')", "language": "python"}


@pytest.fixture(autouse=True)
def alive(call):
    """After each test the next normal call is answered at once."""
    yield
    started = time.monotonic()
    assert call.stdout(GOOD["code"]) == "alive\n"
    assert time.monotonic() - started < 10


def problem(response: httpx.Response, status: int = 422) -> dict:
    assert response.status_code == status, response.text
    return response.json()["detail"][0]


@pytest.mark.parametrize(
    ("given", "kind", "where"),
    [
        ({"code": "1"}, "missing", ["body", "language"]),
        ({"language": "python"}, "missing", ["body", "code"]),
        ([], "model_attributes_type", ["body"]),
        (GOOD | {"language": "cobol"}, "literal_error", ["body", "language"]),
        (GOOD | {"code": 5}, "string_type", ["body", "code"]),
        (GOOD | {"code": None}, "string_type", ["body", "code"]),
        (GOOD | {"run_timeout": None}, "float_type", ["body", "run_timeout"]),
        (GOOD | {"run_timeout": "soon"}, "float_parsing", ["body", "run_timeout"]),
        (GOOD | {"memory_limit_MB": "much"}, "int_parsing", ["body", "memory_limit_MB"]),
        (GOOD | {"memory_limit_MB": 1.5}, "int_from_float", ["body", "memory_limit_MB"]),
        (GOOD | {"stdin": 5}, "string_type", ["body", "stdin"]),
        (GOOD | {"files": ["a"]}, "dict_type", ["body", "files"]),
        (GOOD | {"files": {"a": 1}}, "string_type", ["body", "files", "a"]),
        (GOOD | {"fetch_files": "a"}, "list_type", ["body", "fetch_files"]),
        (GOOD | {"code": "\ud800"}, "string_unicode", ["body", "code"]),
        (GOOD | {"stdin": "\udfff"}, "string_unicode", ["body", "stdin"]),
        (GOOD | {"share": "all"}, "dict_type", ["body", "share"]),
    ],
    ids=str,
)
def test_invalid_fields_are_422_in_fastapis_format(call, given, kind, where):
    detail = problem(call("POST", "/run_code", given))
    assert (detail["type"], detail["loc"]) == (kind, where)
    assert detail["msg"] and "url" not in detail


def test_422_is_fastapis_own(call):
    """The same model behind a real FastAPI application answers the same."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from recipe.sandbox.wire import RunCodeRequest

    app = FastAPI()

    def endpoint(request):
        return None

    endpoint.__annotations__["request"] = RunCodeRequest
    app.post("/run_code")(endpoint)
    contents = [b"{", b"", b'{"code": 1}', b"nonsense", b'{"code": "", "language": "cobol"}', b"[1]", b"\xff"]
    with TestClient(app) as reference:
        for content in [*contents, b'{"code": "x", "language": "x"}', b"[" * 100_000]:
            headers = {"Content-Type": "application/json"}
            theirs = reference.post("/run_code", content=content, headers=headers)
            ours = call("POST", "/run_code", content, headers=headers)
            assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json()), content[:50]


def test_json_that_is_nested_too_deeply_is_400(call):
    kind = {"Content-Type": "application/json"}
    for content in (b"[" * 1_000_000, b'{"a":' * 200_000):
        assert call("POST", "/run_code", content, headers=kind).status_code == 400


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
def test_another_content_type_is_422(call, kind):
    headers = {"Content-Type": kind} if kind is not None else {}
    answer = call("POST", "/run_code", json.dumps(GOOD).encode(), headers=headers)
    assert problem(answer)["type"] == "model_attributes_type"


def test_a_json_content_type_of_any_kind_is_fine(call):
    for kind in ("application/json; charset=utf-8", "application/vnd.x+json"):
        answer = call("POST", "/run_code", json.dumps(GOOD).encode(), headers={"Content-Type": kind})
        assert answer.json()["status"] == "Success"


@pytest.mark.parametrize(
    "fields",
    [
        {"run_timeout": float("nan")},
        {"compile_timeout": float("nan")},
        {"files": {"a": "="}},
        {"files": {"a": "not base64!"}},
        {"files": {"a": "YQ"}},
        {"files": {"": "YQ=="}},
        {"files": {"nul\0": "YQ=="}},
        {"files": {"f": "YQ==", "f/g": "YQ=="}},
        {"files": {"x" * 5000: "YQ=="}},
        {"share": {"../x": "0" * 32}},
    ],
    ids=lambda fields: str(fields)[:50],
)
def test_jobs_that_cannot_be_set_up_are_sandbox_errors(call, fields):
    answer = call.run("print('never')", **fields)
    assert answer["status"] == "SandboxError" and answer["run_result"] is None
    assert answer["message"].startswith("exception on running code print('never'): ")
    assert answer["files"] == {}


@pytest.mark.parametrize("name", ["../up", "a/../../up", "/up", "/tmp/up", "../../../../../../../../tmp/up"])
def test_file_names_never_reach_the_host(call, local, name):
    before = {folder: set(os.listdir(folder)) for folder in ("/", tempfile.gettempdir(), local.root, local.root.parent)}
    answer = call.run("print('maybe')", files={name: "YQ=="}, fetch_files=[name, "../../etc/shadow", "/etc/shadow"])
    assert answer["status"] in ("Success", "SandboxError")
    assert answer["files"] in ({}, {name: "YQ=="})
    for folder, names in before.items():
        assert not {new for new in set(os.listdir(folder)) - names if "up" in new}


def test_bodies_above_the_limit_are_413(call, monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 300)  # a busy machine is no slow client
    size = body.MAX_BODY_BYTES + (8 << 20)  # not many more: httpx copies what it has not sent at each write

    def pieces():
        for _ in range(size >> 20):
            yield b"x" * (1 << 20)

    for content in (b" " * size, pieces()):
        try:
            answer = call("POST", "/run_code", content)
        except (httpx.WriteError, httpx.ReadError):
            # The server answered and closed the connection before everything was sent.
            continue
        assert answer.status_code == 413 and str(body.MAX_BODY_BYTES) in answer.json()["detail"]


def test_one_byte_below_the_limit_is_read(call):
    head = json.dumps(GOOD | {"stdin": ""}).encode()[:-2]
    content = head + b"x" * (body.MAX_BODY_BYTES - len(head) - 2) + b'"}'
    answer = call("POST", "/run_code", content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and answer.json()["run_result"]["stdout"] == "alive\n"


def raw(local, data: bytes, timeout_s: float = 20) -> bytes:
    """Send raw bytes; return everything that the server sends until it closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(local.socket)
        answer = b""
        # The server closes the connection without reading what follows its error.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        with suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
        return answer


def checked(answer: bytes) -> tuple[int, str]:
    """Return the status and the detail of a raw answer, which must be JSON."""
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower() and b"X-Sandbox-Isolation: " in head, answer
    return int(head.split()[1]), json.loads(content)["detail"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00" * 50 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n\0\0\0\r\n\r\n",
        b"GET /v1/ping HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/ping HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /run_code HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST /run_code HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_what_is_not_http_is_400(local, data):
    status, detail = checked(raw(local, data))
    assert status == 400 and isinstance(detail, str) and detail


@pytest.mark.parametrize(
    ("line", "headers", "content", "expected"),
    [
        ("POST /run_code", "Transfer-Encoding: chunked", "nonsense\r\n{}\r\n", 400),
        ("POST /run_code", "Content-Length: 9\r\nContent-Encoding: gzip", "not gzip!", 415),
        ("POST /sessions", "Transfer-Encoding: chunked", "-1\r\n{}\r\n", 400),
        ("GET /v1/ping", "Expect: the impossible", "", 417),
        ("FROBNICATE /v1/ping", "", "", 400),
        ("PROPFIND /v1/ping", "", "", 405),
        ("OPTIONS *", "", "", 404),
        ("GET /\xff\xfe", "", "", 400),
        ("PUT /sessions/x/files/..%2f..", "Content-Length: 1", "x", 404),
    ],
)
def test_every_answer_is_json(local, line, headers, content, expected):
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {local.token}\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n" + (headers and f"{headers}\r\n")
    status, _ = checked(raw(local, f"{head}\r\n{content}".encode("latin-1")))
    assert status == expected


def test_a_body_that_stalls_is_abandoned(local):
    """The client disconnects in the middle of its request."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(local.socket)
        head = f"POST /run_code HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {local.token}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")


def test_slow_bodies_are_408():
    """Runs in this process, where the time-out can be shortened."""
    import asyncio

    from aiohttp import web

    from recipe.sandbox.guard import middlewares

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(await body.read_json(request))

    async def scenario() -> bytes:
        app = web.Application(middlewares=middlewares(""))
        app.router.add_post("/", handler)
        runner = web.AppRunner(app, lingering_time=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: 100\r\n\r\n")
        try:
            async with asyncio.timeout(20):
                for _ in range(100):
                    writer.write(b"1")
                    await asyncio.sleep(0.05)
                    if reader._buffer:
                        break
                return await reader.read()
        finally:
            writer.close()
            await runner.cleanup()

    before, body.BODY_TIMEOUT_S = body.BODY_TIMEOUT_S, 0.3
    try:
        answer = asyncio.run(scenario())
    finally:
        body.BODY_TIMEOUT_S = before
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.3 s" in answer
    assert b"Connection: close" in answer


def test_many_and_long_names(call):
    many = {f"d{n % 100}/f{n}": "YQ==" for n in range(20_000)}
    answer = call.run("import os; print(sum(len(f) for _, _, f in os.walk('.')))", files=many, run_timeout=30)
    assert answer["status"] in ("Success", "SandboxError")
    assert call.run("print(1)", fetch_files=["x" * 5000, "\0", "a\0b", ".", "/", "..", "/etc/shadow"])["files"] == {}


@pytest.mark.parametrize("path", ["/run_jupyter", "/submit", "/sessions"])
def test_other_routes_check_equally_strictly(call, path):
    kind = {"Content-Type": "application/json"}
    assert call("POST", path, b"[1]", headers=kind).status_code == 422
    assert call("POST", path, b"{", headers=kind).status_code == 422
    assert call("POST", path, b"[" * 100_000, headers=kind).status_code == 400


def test_hosts_other_than_this_are_refused_without_a_token():
    from recipe.sandbox.web_pages import is_loopback

    assert all(map(is_loopback, ["localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "::1"]))
    assert not any(map(is_loopback, ["", "evil.example", "10.0.0.1", "0.0.0.0", "localhost.evil.example"]))
