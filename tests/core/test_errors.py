"""How failures are classified: what another try may repair, and what is a bug in the user's code."""

from __future__ import annotations

import errno
import socket
import subprocess
import urllib.error
import urllib.request
from concurrent.futures.process import BrokenProcessPool
from http.client import InvalidURL

import aiohttp
import httpx
import pytest
import requests

from recipe.dag.core.errors import (
    EnvFault,
    Fault,
    GraderFault,
    HookFault,
    ModelServerFault,
    RewardFault,
    ToolFault,
    UserError,
    boundary,
    is_infrastructure,
)

REQUEST = httpx.Request("GET", "http://judge")


def status_error(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("no", request=REQUEST, response=httpx.Response(status, request=REQUEST))


def requests_error(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("no", response=response)


TRANSIENT = [
    ConnectionRefusedError(111, "refused"),
    BrokenPipeError(),
    TimeoutError(),
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.ENOSPC, "No space left on device"),
    BlockingIOError(errno.EAGAIN, "fork"),
    socket.gaierror(-3, "Temporary failure in name resolution"),
    MemoryError(),
    RuntimeError("can't start new thread"),
    EOFError(),
    BrokenProcessPool("a worker died"),
    subprocess.TimeoutExpired("judge", 1),
    ExceptionGroup("two", [TimeoutError(), ConnectionResetError()]),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("slow"),
    httpx.RemoteProtocolError("gone"),
    requests.ConnectionError("refused"),
    requests.Timeout("slow"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ServerTimeoutError(),
    urllib.error.HTTPError("http://judge", 503, "busy", {}, None),
    status_error(429),
    requests_error(502),
]
BUGS = [
    ValueError("bad"),
    KeyError("answer"),
    ZeroDivisionError(),
    AssertionError(),
    FileNotFoundError(errno.ENOENT, "rubric.txt"),
    PermissionError(errno.EACCES, "rubric.txt"),
    RuntimeError("broken"),
    ExceptionGroup("two", [TimeoutError(), TypeError()]),
    urllib.error.HTTPError("http://judge", 401, "who are you", {}, None),
    status_error(404),
    requests_error(400),
    requests.exceptions.InvalidURL("judge"),
    httpx.InvalidURL("judge"),
]


def shown(error: Exception) -> str:
    return f"{type(error).__name__}-{error}"


@pytest.mark.parametrize("error", TRANSIENT, ids=shown)
@pytest.mark.parametrize("fault", [HookFault, EnvFault, RewardFault, ToolFault])
def test_what_another_try_may_repair_is_the_infrastructures(error, fault):
    with pytest.raises(fault) as raised, boundary(fault, "reward.py:score"):
        raise error
    assert (raised.value.cause, raised.value.infra, raised.value.where) == ("infrastructure", True, "reward.py:score")


@pytest.mark.parametrize("error", BUGS, ids=shown)
@pytest.mark.parametrize("fault", [HookFault, EnvFault, RewardFault, ToolFault])
def test_a_bug_is_the_user_codes(error, fault):
    with pytest.raises(fault) as raised, boundary(fault, "reward.py:score"):
        raise error
    assert (raised.value.cause, raised.value.infra) == ("user_code", False)
    record = raised.value.record()
    assert record["cause"] == "user_code" and "test_errors.py:" in record["source"]


def test_what_an_error_was_raised_from_counts():
    def judge(error: Exception):
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("the judge failed") from cause

    def handled():
        try:
            raise ConnectionError
        except ConnectionError:
            raise KeyError("fallback") from None

    with pytest.raises(urllib.error.URLError) as raised:
        urllib.request.urlopen("http://127.0.0.1:1")
    assert is_infrastructure(raised.value)
    for error in (httpx.ConnectError("refused"), status_error(503)):
        with pytest.raises(RuntimeError) as raised:
            judge(error)
        assert is_infrastructure(raised.value)
    with pytest.raises(RuntimeError) as raised:
        judge(KeyError("x"))
    assert not is_infrastructure(raised.value)
    with pytest.raises(KeyError) as raised:
        handled()
    assert not is_infrastructure(raised.value), "what was handled, and put aside by `from None`, is no cause"


def test_a_bug_in_the_code_that_handles_a_lost_connection_is_a_bug():
    def score():
        try:
            raise ConnectionError
        except ConnectionError:
            return {}["score"]

    with pytest.raises(KeyError) as error:
        score()
    assert not is_infrastructure(error.value)
    assert not is_infrastructure(InvalidURL("no host"))


def test_what_a_server_says_cannot_drive_a_terminal():
    said = "no\x1b]0;title\x07 \x9b2J\tyes\r\nline"
    fault = ToolFault(said, where=said)
    texts = [str(fault), str(UserError(said)), fault.record()["message"], fault.record()["where"]]
    assert texts == ["no\ufffd]0;title\ufffd \ufffd2J\tyes\nline"] * 4


def test_code_that_took_too_long_is_neither():
    assert RewardFault("slow", time_limit=True).cause == "time_limit"
    assert ModelServerFault("slow", time_limit=True).cause == "infrastructure"


def test_what_is_classified_already_stays_as_it_is():
    for fault in (GraderFault("busy", where="grader"), EnvFault("wrong"), RewardFault("down", infra=True)):
        with pytest.raises(type(fault)) as raised, boundary(RewardFault, "here"):
            raise fault
        assert raised.value is fault
    assert [GraderFault("").cause, EnvFault("").cause, Fault("").cause] == ["infrastructure", "user_code", "engine"]
    with pytest.raises(UserError), boundary(RewardFault, "here"):
        raise UserError("no")
