"""What every HTTP client shares: pauses between tries, bounds, connections of several loops, proxies."""

from __future__ import annotations

import asyncio
import gc
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from recipe.dag.core import http
from recipe.dag.core.http import Answer, HttpClient, Unavailable, retry_after, within
from tests.tools.web_server import WebServer


def client(url: str = "http://x", **options) -> HttpClient:
    return HttpClient(url, where="a test", **{"retries": 3, "max_wait_s": 10.0, **options})


async def get(made: HttpClient, seconds: float = 20.0) -> Answer:
    return await made.try_once("GET", made.url, timeout=within(seconds))


def pauses(monkeypatch, *failures: Unavailable, **options) -> list[float]:
    """The pauses after these failures, which take no time."""
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)

    async def attempt(tries: int) -> None:
        if tries <= len(failures):
            raise failures[tries - 1]

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(client(**options).repeat(attempt))
    return asked


@pytest.mark.parametrize(("after_s", "low", "high"), [(7.0, 7.0, 10.0), (86400.0, 10.0, 10.0), (0.0, 0.0, 3.0)])
def test_the_pause_that_a_server_asks_for_is_kept_within_the_longest(monkeypatch, after_s, low, high):
    (pause,) = pauses(monkeypatch, Unavailable("slow", after_s=after_s))
    assert low <= pause <= high


def test_other_pauses_are_random_and_bounded(monkeypatch):
    asked = pauses(monkeypatch, *[Unavailable("down")] * 9, retries=9, max_wait_s=0.5)
    assert len(set(asked)) == 9 and max(asked) <= 0.5


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("-1", 0.0),
        ("inf", float("inf")),
        ("nan", None),
        ("soon", None),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0),
        ("Mon, 01 Jan 99999999999 00:00:00 GMT", None),
        ("Mon, 01 Jan 2001 00:00:00 +99999999999999", None),
    ],
)
def test_what_retry_after_means(header, seconds):
    assert retry_after(header) == seconds


def test_a_date_in_retry_after_is_a_pause():
    assert 86000 < (retry_after(format_datetime(datetime.now(UTC) + timedelta(days=1))) or 0) <= 86400


def test_a_server_of_this_machine_is_not_asked_through_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with WebServer(lambda request: {"ok": True}) as server:
        assert asyncio.run(get(client(server.url))).ok
        with pytest.raises(Unavailable, match="ConnectError"):
            asyncio.run(get(client(f"http://nowhere.invalid:{server.port}")))


def test_an_answer_is_read_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(http, "MAX_BYTES", 1 << 20)
    with WebServer(lambda request: (200, "x" * (2 << 20))) as server:
        with pytest.raises(Unavailable, match="longer than 1 MiB"):
            asyncio.run(get(client(server.url)))


def test_a_client_works_on_several_loops_and_gives_no_warning_when_they_end(caplog):
    with WebServer(lambda request: {}) as server:
        made = client(server.url)
        assert all(asyncio.run(get(made)).ok for _ in range(2))
    del made
    gc.collect()
    assert not caplog.records
