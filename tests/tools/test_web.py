"""Requests of tools to a service: what is repeated, what is returned, what ends the run, and where the key goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.core.http import Answer
from recipe.dag.tools.address import ServiceOptions, address_problems, key_from, url_problem
from recipe.dag.tools.web import WebService
from tests.tools.web_server import WebServer


def send(url: str, *, repeatable: bool = True, once: bool = False, **options: Any) -> Answer:
    async def one() -> Answer:
        service = WebService(url, ServiceOptions(**{"request_timeout_s": 5.0, "retries": 2, **options}), where="tool x")
        try:
            return await service.send("POST", json={"a": 1}, repeatable=repeatable, once=once)
        finally:
            await service.close()

    return asyncio.run(one())


def in_turn(*answers: Any) -> Callable[[Any], Any]:
    left = list(answers)
    return lambda request: left.pop(0)


@pytest.mark.parametrize("fault", ["drop", (500, ""), (502, "gateway"), (503, "busy"), (429, "slow"), (408, "")])
def test_what_may_pass_is_repeated(fault):
    with WebServer(in_turn(fault, fault, {"ok": 1})) as server:
        answer = send(server.url)
    assert (answer.status, answer.text, answer.tries) == (200, '{"ok": 1}', 3)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("drop", "disconnected"), ((500, "broken\n here"), "HTTP 500: broken here"), ("hang", "no answer within 0.2 s")],
)
def test_what_does_not_pass_is_a_fault_of_the_infrastructure(fault, said):
    with WebServer(lambda request: fault) as server:
        with pytest.raises(ToolFault) as error:
            send(server.url, request_timeout_s=0.2 if fault == "hang" else 5.0)
    assert said in str(error.value) and "(3 tries)" in str(error.value) and error.value.infra
    assert len(server.requests) == 3 and error.value.where == "tool x"


def test_a_server_that_is_not_there_is_a_fault_of_the_infrastructure():
    with WebServer(lambda request: {}) as server:
        pass
    with pytest.raises(ToolFault) as error:
        send(server.url, repeatable=False)
    assert error.value.infra and "(3 tries)" in str(error.value)  # it cannot have done what was asked


@pytest.mark.parametrize(("fault", "tries"), [((503, ""), 3), ((429, ""), 3), ("drop", 1), ((500, ""), 1), ("hang", 1)])
def test_what_a_server_may_have_done_is_not_asked_for_twice(fault, tries):
    with WebServer(lambda request: fault) as server:
        with pytest.raises(ToolFault):
            send(server.url, repeatable=False, request_timeout_s=0.2 if fault == "hang" else 5.0)
    assert len(server.requests) == tries


def test_a_request_may_be_sent_once_only():
    with WebServer(lambda request: (503, "")) as server:
        with pytest.raises(ToolFault, match=r"\(1 try\)"):
            send(server.url, once=True)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [200, 204, 400, 404, 413, 422])
def test_other_answers_are_returned(status):
    with WebServer(lambda request: (status, "" if status == 204 else "text")) as server:
        answer = send(server.url)
    assert (answer.status, answer.ok, answer.tries) == (status, status < 300, 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, "bad key s3cr3t"), r"tool x: .* refuses the key \(HTTP 401: bad key \*\*\*\)"),
        ((403, ""), "refuses the key"),
        ((302, "", {"Location": "http://other/s3cr3t"}), r"redirects to http://other/\*\*\* .*; write that URL"),
    ],
)
def test_what_would_recur_ends_the_run_without_the_key(answer, message, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "s3cr3t")
    with WebServer(lambda request: answer) as server:
        with pytest.raises(UserError, match=message):
            send(server.url, key_env="SERVICE_KEY")
    assert len(server.requests) == 1


@pytest.mark.parametrize(("header", "value"), [("Authorization", "Bearer s3cr3t"), ("X-API-Key", "s3cr3t")])
def test_the_key_goes_into_one_header_and_is_removed_from_what_comes_back(header, value, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "s3cr3t")
    with WebServer(lambda request: {"you sent": value, "again": "s3cr3t"}) as server:
        answer = send(server.url, key_env="SERVICE_KEY", key_header=header)
    assert server.requests[0].headers[header] == value
    assert "s3cr3t" not in answer.text and answer.text.count("***") == 2
    assert "Authorization" in server.requests[0].headers or header != "Authorization"


def test_without_a_key_the_refusal_names_the_option():
    with WebServer(lambda request: (401, "")) as server:
        with pytest.raises(UserError, match="set key_env"):
            send(server.url)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x/y", "http://", "http://a:b@host/", "http://host/?k=v"])
def test_what_is_no_url_of_a_service(url):
    assert url_problem(url)
    with pytest.raises(UserError, match="tool x: url: "):
        WebService(url, ServiceOptions(), where="tool x")


def test_a_key_is_read_from_the_environment_and_never_repeated(monkeypatch):
    monkeypatch.setenv("MY_KEY", " abc\n")
    assert key_from("MY_KEY", "tool x") == "abc" and key_from(None, "tool x") is None
    monkeypatch.setenv("MY_KEY", "schlüssel")
    with pytest.raises(UserError, match="no HTTP header") as error:
        key_from("MY_KEY", "tool x")
    assert "schl" not in str(error.value)
    with pytest.raises(UserError, match="variable OTHER_KEY is not set"):
        key_from("OTHER_KEY", "tool x")
    with pytest.raises(UserError) as error:
        key_from("sk-12345", "tool x")
    assert "12345" not in str(error.value)
    assert [key for key, _ in address_problems(None, "sk-12345")] == ["key_env"]
    assert not list(address_problems(None, "MY_KEY"))
