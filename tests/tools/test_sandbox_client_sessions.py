"""Sessions through the client: files go in and out under their names, faults are told apart from refusals, and sessions
end with the process that opened them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256

import pytest
from aiohttp import web

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.tools.sandbox_client import FileRefused, SandboxClient, SessionFull
from recipe.dag.tools.sandbox_transport import Request
from recipe.sandbox.launch import LocalSandbox
from tests.tools.sandbox_stub import always, finished, with_stub


def client_of(local: LocalSandbox, **options) -> SandboxClient:
    return SandboxClient(local.url, token=local.token, **options)


async def open_sessions(client: SandboxClient) -> int:
    answer = await client.transport.send(Request("GET", "/v1/status", 5.0))
    return json.loads(answer.body)["sessions"]["open"]


def in_session(local: LocalSandbox, scenario: Callable[[SandboxClient, str], Awaitable], **options):
    """Run a scenario in a session, which must be gone afterwards."""

    async def main():
        client = client_of(local)
        before = await open_sessions(client)
        session = await client.open_session(**options)
        try:
            return await scenario(client, session)
        finally:
            await client.delete(session)
            assert await open_sessions(client) == before
            await client.close()

    return asyncio.run(main())


def test_files_go_in_and_out_of_programs(local):
    async def scenario(client, session):
        await client.put(session, "in/table.csv", b"1,2\n")
        code = "import os\nos.makedirs('out')\nopen('out/sum', 'w').write(str(eval(open('in/table.csv').read())))"
        assert (await client.run_code(code, session_id=session)).status == "success"
        listing = await client.list(session)
        assert dict(listing.sizes) == {"in/table.csv": 4, "out/sum": 6}
        assert listing.modified.keys() == listing.sizes.keys() and 0 < listing.used_bytes < listing.quota_bytes
        assert await client.get(session, "out/sum") == b"(1, 2)"
        await client.delete(session, "out/sum")
        assert list((await client.list(session)).sizes) == ["in/table.csv"]

    in_session(local, scenario)


def test_patterns_fetch_what_a_server_that_looks_for_literal_names_loses(local):
    """SandboxFusion returns the files for which isfile(name) holds, so `*.pkl` finds none and the next agent gets
    nothing."""

    async def scenario(client, session):
        code = "for name in ('X.pkl', 'y.pkl', 'notes.txt'): open(name, 'w').write(name)"
        result = await client.run_code(code, session_id=session, fetch=["*.pkl", "no*.txt", "*.csv"])
        assert result.files == {"X.pkl": b"X.pkl", "y.pkl": b"y.pkl", "notes.txt": b"notes.txt"}
        assert list((await client.list(session, "*.pkl")).sizes) == ["X.pkl", "y.pkl"]
        later = await client.run_code("print(open('X.pkl').read())", session_id=session)
        assert later.stdout == "X.pkl\n" and later.files == {}

    in_session(local, scenario)


def test_a_file_is_found_by_its_name_among_thousands(local):
    async def scenario(client, session):
        code = "for n in range(3000): open(f'a{n}', 'w')\nopen('submission.csv', 'w').write('1')"
        assert (await client.run_code(code, session_id=session)).status == "success"
        assert len((await client.list(session)).sizes) == 1000
        assert dict((await client.list(session, "submission.csv", "nothing")).sizes) == {"submission.csv": 1}

    in_session(local, scenario)


def test_a_file_larger_than_a_request_is_sent_in_parts(local):
    data = bytes(range(256)) * (40 << 12)

    async def scenario(client, session):
        await client.put(session, "large", b"was here")
        await client.put(session, "large", data)
        assert dict((await client.list(session)).sizes) == {"large": 40 << 20}
        code = "import hashlib; print(hashlib.sha256(open('large', 'rb').read()).hexdigest())"
        assert (await client.run_code(code, session_id=session)).stdout.strip() == sha256(data).hexdigest()
        with pytest.raises(FileRefused, match="larger than"):  # the server's limit for one answer
            await client.get(session, "large", max_bytes=1 << 30)

    in_session(local, scenario)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "..", "", "a\0b", "a\ud800", "x" * 300])
def test_names_that_lead_out_or_cannot_be_are_refused(local, name):
    async def scenario(client, session):
        for call in (client.put(session, name, b"x"), client.get(session, name), client.delete(session, name)):
            with pytest.raises(FileRefused):
                await call
        assert not (await client.list(session)).sizes

    in_session(local, scenario)


@pytest.mark.parametrize("name", ["a\nb", "größe 😀", "%2e%2e", "a?offset=3", "*[", "-rf", "d/e/f", "x" * 250])
def test_odd_names_stay_what_they_are(local, name):
    async def scenario(client, session):
        await client.put(session, name, b"kept")
        assert dict((await client.list(session)).sizes) == {name: 4}
        assert await client.get(session, name) == b"kept"
        result = await client.run_code(f"print(open({name!r}).read())", session_id=session)
        assert result.stdout == "kept\n"

    in_session(local, scenario)


def test_links_pipes_and_folders_are_never_read(local):
    traps = (
        "import os\nos.symlink('/etc/passwd', 'link')\nos.mkfifo('pipe')\nos.mkdir('folder')\n"
        "open('real', 'w').write('1')\nos.symlink('real', 'near')\nos.symlink('.', 'round')"
    )

    async def scenario(client, session):
        assert (await client.run_code(traps, session_id=session)).status == "success"
        assert list((await client.list(session)).sizes) == ["real"]
        assert list((await client.list(session, "link", "pipe", "folder", "**")).sizes) == ["real"]
        for name in ("link", "pipe", "folder", "near", "round/real", "missing"):
            with pytest.raises(FileRefused):
                await client.get(session, name)

    in_session(local, scenario)


def test_a_file_above_the_limit_is_not_read(local):
    async def scenario(client, session):
        code = "open('sparse', 'wb').truncate(60 << 20)\nopen('huge', 'wb').truncate(1 << 30)"
        assert (await client.run_code(code, session_id=session)).status == "failed"  # no file of 1 GiB
        assert (await client.list(session)).sizes["sparse"] == 60 << 20
        with pytest.raises(FileRefused, match="larger than"):
            await client.get(session, "sparse")
        await client.put(session, "small", b"12345")
        with pytest.raises(FileRefused, match="5 bytes; at most 4"):
            await client.get(session, "small", max_bytes=4)
        assert await client.get(session, "small", max_bytes=5) == b"12345"

    in_session(local, scenario)


def test_a_full_session_is_a_result_and_not_a_fault(local):
    async def scenario(client, session):
        with pytest.raises(SessionFull):
            await client.put(session, "too much", bytes(3 << 20))
        result = await client.run_code("open('a', 'wb').write(bytes(3 << 20))", session_id=session)
        assert result.status == "failed" and result.stderr
        again = await client.run_code("open('b', 'wb').write(b'1' * 99999)", session_id=session)
        assert again.status == "failed" and again.stderr
        await client.delete(session, "a")
        assert (await client.run_code("open('b', 'wb').write(b'1')", session_id=session)).status == "success"

    in_session(local, scenario, quota_mb=2)


def test_a_session_is_shared_for_reading(local):
    if local.isolation != "full":
        pytest.skip("shares need isolation full")

    async def scenario(client, session):
        other = await client.open_session()
        await client.put(other, "a", b"theirs")
        code = "print(open('/in/them/a').read())\nopen('/in/them/a', 'w')"
        result = await client.run_code(code, session_id=session, share={"them": other})
        assert result.stdout == "theirs\n" and "Read-only" in result.stderr
        await client.delete(other)

    in_session(local, scenario)


def test_a_lost_session_is_a_fault(local):
    async def main():
        client = client_of(local)
        session = await client.open_session()
        await client.delete(session)
        calls = (
            lambda: client.run_code("print(1)", session_id=session),
            lambda: client.list(session),
            lambda: client.put(session, "a", b""),
            lambda: client.get(session, "a"),
        )
        for call in calls:
            with pytest.raises(SandboxFault, match="no such session") as fault:
                await call()
            assert fault.value.infra
        await client.delete(session)
        await client.close()

    asyncio.run(main())


def test_sessions_of_any_time_last_as_long_as_their_client(local):
    """Also one with a shorter time than those before."""

    async def main():
        client, other = client_of(local), client_of(local)
        before = await open_sessions(other)
        long = await client.open_session(ttl_s=300)
        await client.put(long, "a", b"1")
        await asyncio.sleep(0.05)  # the renewal waits for the time of the first
        short = await client.open_session(ttl_s=5.0)
        await client.put(short, "a", b"2")
        await asyncio.sleep(6.0)
        assert await client.get(short, "a") == b"2"
        await client.delete(long)
        await client.close()  # as if the process had ended
        while await open_sessions(other) > before:
            await asyncio.sleep(0.05)
        with pytest.raises(SandboxFault, match="no such session"):
            await other.get(short, "a")
        await other.close()

    asyncio.run(main())


def test_a_cancelled_caller_leaves_no_session(local):
    async def main():
        client = client_of(local)
        before = await open_sessions(client)
        for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.005, 0.02):
            opening = asyncio.create_task(client.open_session())
            await asyncio.sleep(delay_s)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await client.delete(await opening)
        assert await open_sessions(client) == before
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(("session", "sent"), [(None, 2), ("s", 1)])
def test_a_program_that_may_have_run_in_a_session_is_not_sent_again(session, sent):
    seen = []

    async def drop_first(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        if len(seen) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(finished())

    async def scenario(client):
        if session is None:
            assert (await client.run_code("x")).attempts == 2
        else:
            with pytest.raises(SandboxFault, match="1 try"):
                await client.run_code("x", session_id=session)

    with_stub(drop_first, scenario)
    assert len(seen) == sent and [body.get("session_id") for body in seen] == [session] * sent


def test_a_program_that_was_refused_is_sent_again():
    statuses = [504, 503, 429]

    async def busy(_request: web.Request) -> web.Response:
        return web.Response(status=statuses.pop()) if statuses else web.json_response(finished())

    assert with_stub(busy, lambda client: client.run_code("x", session_id="s")).attempts == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        *((always(text=text), "unreadable") for text in ("", "{}", "[]")),
        (always({"files": [{"name": "a"}], "used_bytes": 1, "quota_bytes": 1}), "unreadable"),
        (always({"detail": "not possible in this session"}, status=409), "the session cannot be listed: not possible"),
    ],
)
def test_a_listing_that_is_malformed_or_refused_is_a_fault(answer, message):
    with pytest.raises(SandboxFault, match=message):
        with_stub(answer, lambda client: client.list("s"), "GET /sessions/s/files", retries=1)


def test_a_server_without_sessions_is_an_error_of_the_user():
    with pytest.raises(UserError, match="has no sessions"):
        with_stub(always(finished()), lambda client: client.open_session())


def test_a_server_with_too_many_sessions_is_a_fault():
    asked = []

    async def full(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"detail": "too many"}, status=504)

    with pytest.raises(SandboxFault, match="too many"):
        with_stub(full, lambda client: client.open_session(quota_mb=7, ttl_s=9), "POST /sessions", retries=2)
    assert asked == [{"quota_mb": 7, "ttl": 9, "keep": True}] * 3
