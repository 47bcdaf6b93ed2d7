"""Sessions: over HTTP, with jobs in them, with traps left by jobs."""

from __future__ import annotations

import asyncio
import errno
import os
import time

import pytest

from recipe.sandbox import jobs, session_routes, wire
from recipe.sandbox import sessions as sessions_module
from recipe.sandbox.fair_queue import FairQueue, Overloaded
from recipe.sandbox.job import Job
from recipe.sandbox.outcome import Execution, Outcome
from recipe.sandbox.places import Folders
from recipe.sandbox.sessions import NoSession, Sessions


@pytest.fixture
def session(call):
    """Return a function that makes sessions; all of them are removed at the end."""
    made = []

    def make(**options) -> str:
        answer = call("POST", "/sessions", options)
        assert answer.status_code == 201, answer.text
        made.append(answer.json()["id"])
        return made[-1]

    yield make
    for identifier in made:
        call("DELETE", f"/sessions/{identifier}")


def names(call, identifier: str) -> list[str]:
    return [file["name"] for file in call("GET", f"/sessions/{identifier}").json()["files"]]


def test_only_files_persist_between_calls(call, session):
    mine = session()
    code = "import os, subprocess; os.makedirs('d'); open('d/f', 'w').write('kept'); subprocess.Popen(['sleep', '99'])"
    assert call.run(code, session_id=mine)["status"] == "Success"
    assert call.stdout("print(open('d/f').read())", session_id=mine) == "kept\n"
    assert call.run("print(open('d/f').read())")["status"] == "Failed"
    assert names(call, mine) == ["d/f"]


def test_languages_share_the_directory(call, session):
    mine = session()
    assert call.run("echo from bash > f", language="bash", session_id=mine)["status"] == "Success"
    assert call.stdout("print(open('f').read())", session_id=mine) == "from bash\n\n"
    cells = {"cells": ["open('g', 'w').write('cell')"], "session_id": mine}
    assert call("POST", "/run_jupyter", cells).json()["status"] == "Success"
    assert names(call, mine) == ["f", "g"]


def test_files_over_http(call, session):
    mine = session()
    base = f"/sessions/{mine}/files"
    assert call("PUT", f"{base}/a/b.bin", b"\0\xff" * 1000).json() == {"bytes": 2000}
    assert call("GET", f"{base}/a/b.bin").content == b"\0\xff" * 1000
    assert call.stdout("import os; print(os.path.getsize('a/b.bin'))", session_id=mine) == "2000\n"
    assert call.run("open('a/b.bin', 'a').write('more'); open('a/c', 'w')", session_id=mine)["status"] == "Success"
    assert len(call("GET", f"{base}/a/b.bin").content) == 2004
    assert call("PUT", f"{base}/a/b.bin", b"new").status_code == 201
    assert call("DELETE", f"{base}/a/c").status_code == 200
    assert names(call, mine) == ["a/b.bin"]
    assert call("DELETE", f"{base}/a").status_code == 200
    assert names(call, mine) == []
    assert call("GET", f"{base}/a/b.bin").status_code == 404
    assert call("PUT", f"{base}/", b"x").status_code == 404


@pytest.mark.parametrize("name", ["%2e%2e/up", "a/%2E%2E/%2e%2e/up", "%2Fetc%2Fpasswd", "a%00b", "x" * 300])
def test_invalid_and_missing_names(call, session, name):
    mine = session()
    for method in ("GET", "PUT", "DELETE"):
        answer = call(method, f"/sessions/{mine}/files/{name}", b"x" if method == "PUT" else None)
        assert answer.status_code in (400, 404, 409), answer.text
    assert names(call, mine) == []


def test_traps_that_a_job_left_are_not_followed(call, session):
    mine = session()
    code = (
        "import os\nos.symlink('/etc/passwd', 'file')\nos.symlink('/etc', 'folder')\nos.symlink('..', 'up')\n"
        "os.mkfifo('fifo')\nopen('real', 'w')"
    )
    assert call.run(code, session_id=mine)["status"] == "Success"
    for name in ("file", "folder/passwd", "fifo"):
        assert call("GET", f"/sessions/{mine}/files/{name}").status_code == 409
    for name in ("folder/new", "up/new"):
        assert call("PUT", f"/sessions/{mine}/files/{name}", b"x").status_code == 409
        assert call("DELETE", f"/sessions/{mine}/files/{name}").status_code == 409
    assert call("PUT", f"/sessions/{mine}/files/file", b"mine now").status_code == 201
    assert names(call, mine) == ["file", "real"]
    assert call("GET", f"/sessions/{mine}/files/file").content == b"mine now"


def test_unknown_expired_and_deleted_sessions_are_404(call, session):
    short, gone = session(ttl=0.2), session()
    assert call("DELETE", f"/sessions/{gone}").json() == {"deleted": True}
    time.sleep(0.3)
    for identifier in ("0" * 32, "..", short, gone):
        assert call("GET", f"/sessions/{identifier}").status_code == 404
        body = {"code": "1", "language": "python", "session_id": identifier}
        assert call("POST", "/run_code", body).status_code == 404
        assert call("POST", "/run_code", body | {"session_id": None, "share": {"A": identifier}}).status_code == 404


def test_renewed_sessions_live_on(call, session):
    renewed, left = session(ttl=6.0), session(ttl=1.0)
    lost = []
    for _ in range(8):
        time.sleep(0.8)
        lost.append(call("POST", "/sessions/renew", {"ids": [renewed, "0" * 32]}).json()["lost"])
    assert lost == [1] * 8
    assert call("GET", f"/sessions/{renewed}").status_code == 200
    assert call("GET", f"/sessions/{left}").status_code == 404
    assert call("POST", "/sessions/renew", {"ids": "all"}).status_code == 422


def test_a_listing_is_restricted_to_patterns(call, session):
    mine = session()
    for name in ("a.csv", "b.txt", "d/a.csv", "d/e/c.csv", "d/.hidden.csv"):
        assert call("PUT", f"/sessions/{mine}/files/{name}", b"x").status_code == 201
    wanted = {"*.csv": ["a.csv"], "**/*.csv": ["a.csv", "d/a.csv", "d/e/c.csv"], "d/*": ["d/a.csv"], "no": []}
    for pattern, expected in wanted.items():
        files = call("GET", f"/sessions/{mine}/files", params={"match": pattern}).json()["files"]
        assert [file["name"] for file in files] == expected
    both = call("GET", f"/sessions/{mine}/files", params={"match": ["b.txt", "d/.hidden.csv"]}).json()["files"]
    assert [file["name"] for file in both] == ["b.txt", "d/.hidden.csv"]


def test_a_file_is_written_in_parts(call, session):
    mine = session()
    file = f"/sessions/{mine}/files/parts"
    assert call("PUT", file, b"0123456789").status_code == 201
    assert call("PUT", f"{file}?offset=4", b"abc").status_code == 201
    assert call("GET", file).content == b"0123abc"
    assert call("PUT", f"{file}?offset=8", b"x").status_code == 409
    for wrong in ("-1", "x", "9" * 30):
        assert call("PUT", f"{file}?offset={wrong}", b"x").status_code == 400
    assert call.run("import os; os.symlink('/etc/passwd', 'link'); os.link('parts', 'second')", session_id=mine)
    for name in ("link", "second", "missing", "link/x"):
        assert call("PUT", f"/sessions/{mine}/files/{name}?offset=1", b"x").status_code in (404, 409)
    assert call.stdout("print(open('parts').read())", session_id=mine) == "0123abc\n"


def test_settling_leaves_what_is_within_the_quota(call, session):
    mine = session(quota_mb=2)
    assert call.run("open('f', 'wb').write(bytes(1 << 20))", session_id=mine)["status"] == "Success"
    assert call("POST", f"/sessions/{mine}/settle").json() == {"removed": []}
    assert names(call, mine) == ["f"] and not call("GET", f"/sessions/{mine}").json()["full"]
    assert call("POST", f"/sessions/{'0' * 32}/settle").status_code == 404


def test_invalid_times_and_quotas_are_refused(call):
    for wrong in ({"ttl": 0}, {"ttl": 1e9}, {"quota_mb": 0}, {"quota_mb": 1 << 40}):
        assert call("POST", "/sessions", wrong).status_code == 400, wrong
    assert call("POST", "/sessions", {"ttl": float("nan")}).status_code == 422


def test_a_session_without_a_body_has_the_defaults(call):
    made = call("POST", "/sessions").json()
    assert made.keys() == {"id", "ttl", "expires_in", "quota_bytes", "used_bytes"} and len(made["id"]) == 32
    assert (made["ttl"], made["quota_bytes"], made["used_bytes"]) == (3600, 256 << 20, 0)
    call("DELETE", f"/sessions/{made['id']}")


def test_a_server_without_descriptors_says_so_instead_of_an_empty_listing(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario() -> None:
        session = await Sessions(Folders(tmp_path)).create()
        with pytest.raises(wire.Invalid) as error, session_routes._file_errors(session), monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            session_routes._list(session.place.directory(), [], 10)
        assert error.value.status == 503 and "Too many open files" in error.value.detail
        session.place.remove()

    asyncio.run(scenario())


def test_one_writer_at_a_time(call, session):
    mine = session()
    code = (
        "import time\nn = int(open('n').read()) if __import__('os').path.exists('n') else 0\n"
        "time.sleep(0.05)\nopen('n', 'w').write(str(n + 1))"
    )

    async def scenario() -> list[str]:
        async with call.connect() as http:
            body = {"code": code, "language": "python", "session_id": mine}
            answers = await asyncio.gather(*(http.post("/run_code", json=body) for _ in range(12)))
            return [answer.json()["status"] for answer in answers]

    assert asyncio.run(scenario()) == ["Success"] * 12
    assert call("GET", f"/sessions/{mine}/files/n").content == b"12"


def test_quota(call, session, full_isolation):
    """The program gets the error, as from a full disk, and can make room itself; nothing is taken from it."""
    mine = session(quota_mb=2)
    assert call("PUT", f"/sessions/{mine}/files/kept", b"x" * 1_000_000).status_code == 201
    full = call("PUT", f"/sessions/{mine}/files/more", b"x" * 1_500_000)
    assert full.status_code == 507 and "delete files first" in full.json()["detail"]
    assert names(call, mine) == ["kept"]
    answer = call.run("open('big', 'wb').write(bytes(4_000_000))", session_id=mine)
    assert answer["status"] == "Failed" and "No space left" in answer["run_result"]["stderr"]
    assert names(call, mine) == ["big", "kept"]
    assert call("GET", f"/sessions/{mine}").json()["used_bytes"] == 2 << 20
    code = "import os; os.unlink('big'); open('small', 'w').write('fits')"
    assert call.run(code, session_id=mine)["status"] == "Success"
    assert call("GET", f"/sessions/{mine}").json()["used_bytes"] < 2 << 20


def test_a_session_is_not_visible_to_others(call, session, full_isolation):
    secret = session()
    call("PUT", f"/sessions/{secret}/files/hidden", b"x")
    code = (
        "import os, sys\nfound = []\nskip = {'/proc', '/usr', sys.prefix, sys.base_prefix}\n"
        "for d, ds, fs in os.walk('/'):\n    ds[:] = [n for n in ds if os.path.join(d, n) not in skip]\n"
        "    found += [os.path.join(d, f) for f in fs if f == 'hidden']\n"
        f"print(found, any({secret!r} in open(p).read() for p in ['/proc/self/mountinfo', '/proc/mounts']))"
    )
    assert call.stdout(code, run_timeout=60, session_id=session()) == "[] False\n"


def test_sharing_is_explicit_and_read_only(call, session, full_isolation):
    theirs, mine = session(), session()
    call("PUT", f"/sessions/{theirs}/files/data.csv", b"1,2\n")
    code = (
        "import errno, os\nprint(open('/in/alice/data.csv').read().strip(), os.listdir('/in'))\n"
        "try: open('/in/alice/data.csv', 'a')\nexcept OSError as error: print(errno.errorcode[error.errno])\n"
        "open('mine', 'w').write('x')"
    )
    answer = call.run(code, session_id=mine, share={"alice": theirs})
    assert answer["run_result"]["stdout"].splitlines() == ["1,2 ['alice']", "EROFS"], answer
    assert names(call, mine) == ["mine"] and names(call, theirs) == ["data.csv"]
    assert call.stdout("import os; print(os.path.exists('/in/alice'))", session_id=mine) == "False\n"


def test_deleting_while_a_job_runs_waits_for_the_job(call, session):
    mine = session()

    async def scenario() -> tuple[int, str, int]:
        async with call.connect() as http:
            code = "import time; time.sleep(2); open('f', 'w').write('x'); print('written')"
            job = asyncio.create_task(
                http.post("/run_code", json={"code": code, "language": "python", "session_id": mine})
            )
            while (await http.get("/v1/status")).json()["running"] != 1:
                assert not job.done()
                await asyncio.sleep(0.02)
            deleted = await http.delete(f"/sessions/{mine}")
            after = await http.get(f"/sessions/{mine}")
            return deleted.status_code, (await job).json()["run_result"]["stdout"], after.status_code

    assert asyncio.run(scenario()) == (200, "written\n", 404)


def test_requests_that_share_each_others_sessions_do_not_deadlock(call, session, local, full_isolation):
    one, two = session(), session()
    code = "open('f', 'a').write('x'); print(1)"

    async def scenario() -> list[str]:
        async with call.connect() as http:
            bodies = [{"session_id": a, "share": {"other": b, "same": a}} for a, b in ((one, two), (two, one)) * 6]
            answers = [http.post("/run_code", json={"code": code, "language": "python", **body}) for body in bodies]
            return [answer.json()["status"] for answer in await asyncio.gather(*answers)]

    assert asyncio.run(scenario()) == ["Success"] * 12
    assert call("GET", f"/sessions/{one}/files/f").content == b"x" * 6


def test_a_reader_cannot_reach_a_process_of_the_writer(call, session, local, full_isolation):
    theirs, mine = session(), session()
    write = (
        "import socket\ns = socket.socket(socket.AF_UNIX); s.bind('s'); s.listen(); s.settimeout(3)\n"
        "try: s.accept(); print('reached')\nexcept TimeoutError: print('alone')"
    )
    read = (
        "import errno, socket\nwhile True:\n  try: socket.socket(socket.AF_UNIX).connect('/in/a/s'); print('reached')\n"
        "  except FileNotFoundError: continue\n  except OSError as error: print(errno.errorcode[error.errno])\n  break"
    )

    async def scenario() -> list[str]:
        async with call.connect() as http:
            writer = http.post("/run_code", json={"code": write, "language": "python", "session_id": theirs})
            writing = asyncio.create_task(writer)
            while (await http.get("/v1/status")).json()["running"] != 1:
                assert not writing.done()
                await asyncio.sleep(0.02)
            body = {"code": read, "language": "python", "session_id": mine, "share": {"a": theirs}, "run_timeout": 20}
            reader = await http.post("/run_code", json=body)
            return [answer.json()["run_result"]["stdout"] for answer in (await writing, reader)]

    assert asyncio.run(scenario()) == ["alone\n", "ECONNREFUSED\n"]


def test_the_least_recently_used_idle_session_makes_room(tmp_path):
    async def scenario() -> None:
        sessions = Sessions(Folders(tmp_path), max_sessions=2)
        first, second = await sessions.create(), await sessions.create()
        with sessions.use(first.id):
            third = await sessions.create()
            assert len(sessions) == 2 and first.place.path.exists()
            with sessions.use(third.id), pytest.raises(Overloaded):
                await sessions.create()
        with pytest.raises(NoSession):
            sessions.use(second.id).__enter__()
        await sessions.close()

    asyncio.run(scenario())
    assert not any(tmp_path.iterdir())


def test_all_sessions_together_stay_below_the_limit(tmp_path):
    async def scenario() -> None:
        sessions = Sessions(Folders(tmp_path), max_bytes=1_500_000)
        old, new = await sessions.create(), await sessions.create()
        for session in (old, new):
            (session.place.path / "f").write_bytes(bytes(1_000_000))
            with sessions.use(session.id):
                await sessions.measure(session)
        assert len(sessions) == 1 and new.place.path.exists()
        (new.place.path / "more").write_bytes(bytes(1_000_000))
        with sessions.use(new.id):
            await sessions.measure(new)
        with pytest.raises(Overloaded):
            await sessions.create(client="another")
        assert new.place.path.exists()
        await sessions.close()

    asyncio.run(scenario())
    assert not any(tmp_path.iterdir())


def test_a_session_to_keep_makes_room_for_none(tmp_path):
    async def scenario() -> None:
        sessions = Sessions(Folders(tmp_path), max_sessions=2, max_bytes=1_500_000)
        kept, other = await sessions.create(keep=True), await sessions.create()
        third = await sessions.create(keep=True)
        with pytest.raises(NoSession):
            sessions.use(other.id).__enter__()
        with pytest.raises(Overloaded):
            await sessions.create()
        for session in (kept, third):
            (session.place.path / "f").write_bytes(bytes(1_000_000))
            with sessions.use(session.id):
                await sessions.measure(session)
        assert len(sessions) == 2 and kept.place.path.exists() and third.place.path.exists()
        await sessions.delete(kept.id)
        assert len(sessions) == 1
        await sessions.create()
        await sessions.close()

    asyncio.run(scenario())
    assert not any(tmp_path.iterdir())


def test_kept_sessions_above_their_share_stop_growing_when_all_hold_too_much(tmp_path):
    class Engine:
        async def execute(self, job: Job) -> Execution:
            return Execution(Outcome("finished", 0, "ran", "", 0.0))

    async def scenario() -> None:
        sessions = Sessions(Folders(tmp_path), max_bytes=1_500_000)
        runner = jobs.Jobs(Engine(), FairQueue(2, 4), sessions)
        large, small, idle = [await sessions.create(keep=True) for _ in range(3)]

        async def hold(session, size: int) -> None:
            (session.place.path / "f").write_bytes(bytes(size))
            await sessions.measure(session)

        async def run(session) -> str:
            request = jobs.JobRequest("client", Job("1"), session_id=session.id)
            return (await runner.run(request)).run.stdout

        await hold(large, 1_200_000)
        assert await run(large) == "ran"  # its share counts only when the limit is exceeded
        await hold(small, 400_000)
        with pytest.raises(wire.Invalid, match="the server is full .*above its share.*delete files first") as error:
            await run(large)
        assert error.value.status == 507
        assert await run(small) == "ran" and await run(idle) == "ran"
        await hold(large, 1000)
        assert await run(large) == "ran"
        await sessions.close()

    asyncio.run(scenario())


def test_expired_sessions_are_swept_unless_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions_module, "_SWEEP_S", 0.01)

    async def scenario() -> None:
        sessions = Sessions(Folders(tmp_path))
        sessions.start()
        used, idle = await sessions.create(ttl_s=1.0), await sessions.create(ttl_s=0.1)
        with sessions.use(used.id):
            while idle.place.path.exists():
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.2)
            assert used.place.path.exists()
            with sessions.use(used.id):
                pass
        await sessions.close()

    asyncio.run(scenario())


def test_the_sweeper_survives_an_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sessions_module, "_SWEEP_S", 0.01)

    async def scenario() -> None:
        sessions = Sessions(Folders(tmp_path))
        remove, failures = sessions._remove, iter([RuntimeError("for this test")])

        def fail_once(name: str) -> None:
            for error in failures:
                raise error
            remove(name)

        monkeypatch.setattr(sessions, "_remove", fail_once)
        sessions.start()
        await sessions.create(ttl_s=0.01)
        while len(sessions):
            await asyncio.sleep(0.01)
        await sessions.close()

    asyncio.run(scenario())
    assert "could not be removed" in caplog.text and not any(tmp_path.iterdir())


# Without full isolation, sessions are folders: the quota is measured.


class Writer:
    """An engine whose jobs write 2 MiB, and then wait until they are ended or end at once."""

    isolation = "rlimits"

    def __init__(self, root, *, waits: bool):
        self.store = Folders(root)
        self._waits = waits

    async def execute(self, job: Job) -> Execution:
        (job.work.path / "big").write_bytes(bytes(2 << 20))
        if self._waits:
            await asyncio.Event().wait()
        return Execution(Outcome("finished", 0, "done", "", 0.0))


@pytest.mark.parametrize("waits", [True, False])
def test_a_measured_quota_ends_the_call_and_refuses_the_next(tmp_path, monkeypatch, waits):
    monkeypatch.setattr(jobs, "_WATCH_S", 0.01)

    async def scenario() -> None:
        engine = Writer(tmp_path, waits=waits)
        sessions = Sessions(engine.store)
        session = await sessions.create(quota_mb=1)
        request = jobs.JobRequest("me", Job("code"), session_id=session.id)
        runner = jobs.Jobs(engine, FairQueue(1, 1), sessions)
        run = (await runner.run(request)).run
        assert run.return_code == -9 and "the session is full" in run.stderr and run.stdout == ("" if waits else "done")
        with pytest.raises(wire.Invalid, match="delete files first"):
            await runner.run(request)
        (session.place.path / "big").unlink()
        assert (await runner.run(request)).run.return_code == -9
        await sessions.close()

    asyncio.run(scenario())
    assert not any(tmp_path.iterdir())


def test_a_client_that_hangs_up_frees_the_session(tmp_path):
    async def scenario() -> None:
        engine = Writer(tmp_path, waits=True)
        sessions = Sessions(engine.store)
        session = await sessions.create()
        runner = jobs.Jobs(engine, FairQueue(1, 1), sessions)
        task = asyncio.create_task(runner.run(jobs.JobRequest("me", Job("code"), session_id=session.id)))
        while not list(session.place.path.iterdir()):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with sessions.hold(session.id, 1):
            assert session.used_bytes == 2 << 20 and runner.queue.running == 0
        await sessions.close()

    asyncio.run(scenario())
