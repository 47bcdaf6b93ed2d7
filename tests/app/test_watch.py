"""`verl-dag watch`: who is answered, how it ends, and its page in a headless Chromium or Chrome while runs go on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import aiohttp
import pytest
from aiohttp import web

from recipe.dag.app.watch import application
from recipe.dag.report.journal import Journal, Place, read_from
from recipe.dag.report.viewer import live
from tests.browser import browser, find
from tests.report.conftest import build_call, build_episode

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def served(*folders: Path):
    """Serve the page of runs in this process; yields its URL and a coroutine function that ends the server."""
    runner = web.AppRunner(application(folders, "token"), shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/token", runner.cleanup
    finally:
        await runner.cleanup()


def write(folder: Path, step: int, uids: Iterable[str] = "ab", siblings: range = range(2), text: str = "") -> Journal:
    """Write episodes of a step, without its metrics."""
    journal = Journal(folder, max_per_step=None)
    episodes = [
        build_episode(
            f"{step}-{uid}",
            index,
            calls=[build_call("plan", text=text or f"plan of {step}"), build_call("check", reward=1.0, advantage=0.5)],
            sample={"prompt": f"problem {uid}", "ground_truth": "42"},
            outcome=float(index % 2),
        )
        for uid in uids
        for index in siblings
    ]
    journal.episodes(step, episodes)
    return journal


def test_only_this_machine_reads_and_nothing_else_is_served(tmp_path):
    write(tmp_path, 1)

    async def main():
        async with served(tmp_path) as (url, _), aiohttp.ClientSession() as client:

            async def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
                target = aiohttp.client.URL(f"{url}{path}", encoded=True)
                async with client.request(method, target, headers=headers) as answer:
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    return answer.status, await answer.text()

            ask_for = "open the address that verl-dag watch printed"
            status, page = await ask("/")
            assert status == 200 and "connect-src 'self'" in page and "plan of" not in page
            assert (await ask("/", Host="localhost:1"))[0] == 200
            for refused in (
                {"Host": "evil.example"},
                {"Origin": "http://evil.example"},
                {"Sec-Fetch-Site": "cross-site"},
            ):
                for path in ("/", "/0/news", "/0/chunk-0"):
                    assert await ask(path, **refused) == (403, ask_for)
            async with client.get(aiohttp.client.URL(url).with_path("/favicon.ico")) as answer:
                assert answer.status == 204
            news = json.loads((await ask("/0/news"))[1])
            assert len(news["episodes"]) == 4
            assert (await ask(f"/0/news?since={news['version']}"))[0] == 204
            assert "plan of 1" in (await ask("/0/chunk-0"))[1]
            async with client.get(aiohttp.client.URL(url).with_path("/0/news")) as answer:
                assert (answer.status, await answer.text()) == (404, ask_for)
            for path in ("/1/news", "/0/chunk-9", "/0/episodes.jsonl", "/0/..%2f..%2fetc%2fpasswd", "/episodes.jsonl"):
                assert (await ask(path))[0] == 404
            assert (await ask("/0/news?since=1.x"))[0] == 400
            assert [(await ask("/0/news", method))[0] for method in ("POST", "PUT", "DELETE")] == [405] * 3

    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    asyncio.run(main())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_client_that_leaves_while_a_run_is_read_does_not_disturb_the_next(tmp_path, monkeypatch):
    write(tmp_path, 1)
    started, go_on = threading.Semaphore(0), threading.Event()

    def slow(file: BinaryIO, place: Place):
        if file.name.endswith("episodes.jsonl"):
            started.release()
            go_on.wait(60)
        yield from read_from(file, place)

    monkeypatch.setattr(live, "read_from", slow)

    async def main():
        async with served(tmp_path) as (url, _), aiohttp.ClientSession() as client:

            async def news():
                async with client.get(f"{url}/0/news") as answer:
                    return await answer.json()

            leaves = asyncio.create_task(news())
            assert await asyncio.to_thread(started.acquire, timeout=60)
            leaves.cancel()
            stays = asyncio.create_task(news())
            assert not await asyncio.to_thread(started.acquire, timeout=0.5), "two threads read the same run"
            go_on.set()
            assert len((await stays)["episodes"]) == 4

    asyncio.run(main())


def test_ctrl_c_ends_it_without_an_error(tmp_path, zygote):
    command = [str(zygote.python), "-m", "recipe.dag.cli", "watch", str(tmp_path / "later")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/\n", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stdout.read(), process.stderr.read()) == (0, "", "")


@asynccontextmanager
async def watching(*folders: Path, route: str = "", **options):
    """Open the page in a tab; yields the tab and a coroutine function that ends the server."""
    executable = find()
    if executable is None:
        pytest.skip("no Chromium or Chrome on PATH, and CHROME is not set")
    async with served(*folders) as (url, end), browser(executable) as new_tab:
        tab = await new_tab()
        await tab.open(f"{url}/{route}", **options)
        yield tab, end
        await tab.close()


def test_a_run_appears_as_it_is_written(tmp_path):
    folder = tmp_path / "later"

    async def main():
        async with watching(folder) as (tab, end):
            await tab.until("document.querySelector('main').textContent.includes('Nothing is recorded yet')")
            write(folder, 1).metrics(1, {"episode/accuracy": 0.5, "episode/count": 4.0})
            await tab.until("document.querySelector('main').textContent.includes('Workflow at step 1')")
            journal = write(folder, 2, siblings=range(2))
            journal.metrics(2, {"episode/accuracy": 0.75, "episode/count": 4.0})
            await tab.until("document.querySelector('main').textContent.includes('Workflow at step 2')")
            assert await tab.value("document.querySelectorAll('.uplot').length") == 2
            await tab.value("location.hash = '#/group/2/train/2-a'")
            await tab.until("document.querySelectorAll('.siblings thead th').length === 4")
            await tab.until("document.querySelector('.siblings .snippet')?.textContent.includes('plan of 2')")
            write(folder, 2, siblings=range(2, 4), text="another plan")
            await tab.until("document.querySelectorAll('.siblings thead th').length === 6")
            await tab.until("document.querySelector('.siblings').textContent.includes('another plan')")
            assert tab.errors == []
            await end()
            await tab.until("document.querySelector('nav [role=status]').textContent.includes('does not answer')")
            assert await tab.value("document.querySelectorAll('.siblings thead th').length") == 6

    asyncio.run(main())


def test_flags_appear_as_they_are_written(tmp_path):
    text = "document.querySelector('main').textContent"

    async def main():
        async with watching(tmp_path, route="#/audit") as (tab, _):
            await tab.until(f"{text}.includes('No rule has looked')")
            write(tmp_path, 1).metrics(1, {"hack/many_boxes": 0.0, "hack/any": 0.0})
            await tab.until(f"{text}.includes('No rule fired. These looked: many_boxes')")
            journal = Journal(tmp_path)
            flag = {"rule": "many_boxes", "reason": "4 different boxed answers", "call": 0}
            journal.episodes(2, [build_episode("2-a", flags=[flag])])
            await tab.until("document.querySelector('.compared .row a')?.textContent.includes('2-a number 0')")
            journal.metrics(2, {"hack/many_boxes": 1.0, "hack/any": 1.0})
            await tab.until("document.querySelector('.legend b')?.textContent === '1'")
            assert tab.errors == []

    asyncio.run(main())


FRAME = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"


def test_an_episode_stays_open_where_it_is_read(tmp_path):
    write(tmp_path, 1, text="\n".join(f"line {number}" for number in range(2000)))
    asked = "performance.getEntriesByType('resource').filter((one) => one.name.includes('news'))"
    answer = "document.querySelector('[aria-label=answer]')"
    place = f"[scrollY, {answer}.scrollTop, location.hash, document.body.dataset.mark]"

    async def main():
        async with watching(tmp_path, route="#/episode/1/train/1-a/1/0", height=400) as (tab, _):
            await tab.until("document.querySelector('.detail .more') !== null")
            await tab.value("document.querySelector('.detail .more').click(); document.body.dataset.mark = 'the same'")
            await tab.value(FRAME)
            await tab.value(f"scrollTo(0, 300); {answer}.scrollTop = 9000")
            before = await tab.value(place)
            assert before == [300, 9000, "#/episode/1/train/1-a/1/0", "the same"]
            write(tmp_path, 2).metrics(2, {"loss": 1.0})
            with (tmp_path / "episodes.jsonl").open("a") as file:
                file.write('{"step": 3, "uid"')
            await tab.until(f"{asked}.filter((one) => one.responseStatus === 200).length === 2")
            await tab.value(FRAME)
            assert await tab.value(place) == before
            await tab.press("}")
            await tab.until("location.hash === '#/episode/2/train/2-a/1/0'")
            assert tab.errors == []

    asyncio.run(main())


def test_a_list_stays_where_it_is_read(tmp_path):
    seen = "document.elementFromPoint(40, 300).textContent"
    write(tmp_path, 1, uids=[f"{number:03}" for number in range(300)], siblings=range(1))
    write(tmp_path, 2, uids=[f"{number:03}" for number in range(100, 300)], siblings=range(1))

    async def main():
        async with watching(tmp_path, route="#/problems") as (tab, _):
            await tab.value("document.querySelector('.windowed').scrollTop = 2600")
            await tab.until(f"{seen}.includes('problem')")
            before = await tab.value(seen)
            # these were never solved, and come first when they are
            write(tmp_path, 3, uids=[f"{number:03}" for number in range(280, 300)], siblings=range(1, 2))
            await tab.until("document.querySelector('h1').textContent.includes('over 3 steps')")
            await tab.value(FRAME)
            assert await tab.value(seen) == before
            assert await tab.value("document.querySelector('.windowed').scrollTop") == 2600 + 20 * 26
            assert tab.errors == []

    asyncio.run(main())


def test_several_runs_are_compared_while_they_go_on(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / name, 1).metrics(1, {"tokens/sampled": 100.0, "episode/accuracy": 0.5})

    async def main():
        async with watching(tmp_path / "one", tmp_path / "two") as (tab, _):
            await tab.until("location.hash === '#/compare'")
            await tab.until("document.querySelector('.steps b')?.textContent === '100'")
            write(tmp_path / "two", 2).metrics(2, {"tokens/sampled": 50.0, "episode/accuracy": 1.0})
            cells = "[...document.querySelectorAll('tbody tr')].map((row) => row.children[2].textContent).join()"
            await tab.until(f"{cells} === '1,2'")
            write(tmp_path / "one", 2).metrics(2, {"tokens/sampled": 60.0, "episode/accuracy": 1.0})
            await tab.until("document.querySelector('.steps b').textContent === '150'")
            assert tab.errors == []

    asyncio.run(main())


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path):
    write(tmp_path / "one", 1).metrics(1, {"episode/accuracy": 0.5})
    write(tmp_path / "two", 1)
    launch = tmp_path / "two" / "run" / "1" / "launch.json"
    launch.parent.mkdir(parents=True)
    launch.write_text("{")
    state = "document.querySelector('nav [role=status]').textContent"
    names = "[...document.querySelectorAll('nav option')].map((one) => one.textContent).join()"

    async def main():
        async with watching(tmp_path / "one", tmp_path / "two", route="#/run") as (tab, _):
            await tab.until(f"{state}.includes('run 2: ') && {state}.includes('launch.json')")
            await tab.until("document.querySelector('main').textContent.includes('Workflow at step 1')")
            assert "2 · cannot be read" in await tab.value(names)
            launch.write_text("{}")
            await tab.until(f"{state} === 'live' && {names}.endsWith('/two')")
            assert all("500" in error for error in tab.errors)

    asyncio.run(main())


def test_an_open_screen_shows_the_texts_after_a_resume(tmp_path):
    write(tmp_path, 1)
    journal = write(tmp_path, 2, text="before")
    text = "document.querySelector('.siblings')?.textContent"

    async def main():
        async with watching(tmp_path, route="#/group/2/train/2-a") as (tab, _):
            await tab.until(f"{text}?.includes('before')")
            journal.truncate_after(1)
            write(tmp_path, 2, text="afterwards")
            await tab.until(f"{text}?.includes('afterwards')")

    asyncio.run(main())


def test_a_part_that_has_gone_is_asked_for_once(tmp_path):
    for step in (1, 2, 3):
        journal = write(tmp_path, step)
    asked = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('{}')).length"
    hold = """globalThis.asked = 0;
        const ask = fetch;
        const free = new Promise((done) => { globalThis.release = done; });
        globalThis.fetch = async (path) => {
          if (path.includes('news')) { globalThis.asked += 1; await free; }
          return ask(path);
        }"""

    async def main():
        async with watching(tmp_path, route="#/group/1/train/1-a") as (tab, _):
            await tab.until("document.querySelector('.siblings .snippet')?.textContent.includes('plan of 1')")
            await tab.value(hold)
            await tab.until("asked === 1")
            journal.truncate_after(1)
            await tab.value("location.hash = '#/group/3/train/3-a'")
            await tab.until(f"{asked.format('chunk-2')} > 0")
            await tab.value("release()")
            await tab.until("asked === 3")
            assert await tab.value(asked.format("chunk-2")) == 1
            assert await tab.value("document.querySelector('.siblings')") is None
            assert all("404" in error for error in tab.errors)

    asyncio.run(main())
