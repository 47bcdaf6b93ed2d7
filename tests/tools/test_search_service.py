"""Search through a service: what is sent, how the answer is read, and which failure is whose."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.tools.base import Resources
from recipe.dag.tools.search import Search, at, filled
from recipe.dag.types.record import ToolResult
from tests.tools.web_server import Request, WebServer

DOCUMENTS = [
    {"document": {"id": "1", "contents": '"Wolf"\nIt howls.'}, "score": 2.0},
    {"document": {"id": "2", "contents": "x" * 90}, "score": 1.0},
    {"document": {"id": "3", "contents": "third"}, "score": 0.5},
]


def search(url: str, query: str = "who howls?", **options: Any) -> ToolResult:
    async def one() -> ToolResult:
        tool = Search.make(Search.Options(url=url, **options), Resources("w.yaml"))
        try:
            return await tool.execute({"query": query}, {})
        finally:
            await tool.close()

    return asyncio.run(one())


def check(url: str, **options: Any) -> str:
    return asyncio.run(Search.make(Search.Options(url=url, **options), Resources("w.yaml")).check())


def test_the_form_of_search_r1_is_the_default():
    with WebServer(lambda request: {"result": [DOCUMENTS]}) as server:
        result = search(server.url, top_k=2, snippet_chars=50)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/here")
    assert request.body == {"queries": ["who howls?"], "topk": 2, "return_scores": True}
    assert (result.status, result.attempts) == ("success", 1)
    assert result.text == '[1] "Wolf"\nIt howls.\n\n[2] ' + "x" * 47 + "..."


def test_a_plain_service_is_described_by_its_request_and_its_answer():
    def answer(request: Request) -> Any:
        return {"hits": {"items": [{"name": "Wolf", "body": f"about {request.query['q'][0]}"}]}}

    with WebServer(answer) as server:
        result = search(
            server.url,
            method="GET",
            request={"q": "{query}", "limit": "{top_k}", "site": ["a", "b"]},
            results="hits.items",
            text="body",
            title="name",
        )
    assert result.text == "[1] Wolf\nabout who howls?"
    assert server.requests[0].query == {"q": ["who howls?"], "limit": ["3"], "site": ["a", "b"]}


def test_documents_may_be_texts_and_there_may_be_none():
    answers = [["one", "two"], []]
    with WebServer(lambda request: answers.pop(0)) as server:
        assert search(server.url, results="", text="").text == "[1] one\n\n[2] two"
        assert search(server.url, results="", text="").text == "No results."


def test_an_overloaded_service_is_asked_again():
    answers = [(503, ""), "drop", {"result": [DOCUMENTS]}]
    with WebServer(lambda request: answers.pop(0)) as server:
        result = search(server.url)
    assert (result.status, result.attempts) == ("success", 3)


def test_a_refused_query_is_a_result_that_the_model_reads():
    with WebServer(lambda request: (422, '{"detail": "query too long"}')) as server:
        result = search(server.url)
    assert result.status == "failed" and result.text.endswith('HTTP 422: {"detail": "query too long"}')


@pytest.mark.parametrize(
    ("answer", "options", "infra", "message"),
    [
        ((500, "x"), {"retries": 0}, True, "HTTP 500: x"),
        ((200, "<html>"), {}, True, "the answer is not JSON: '<html>'"),
        ({"hits": []}, {}, False, "no list at `results: result.0` in an object with the keys hits"),
        ([1], {}, False, "in a list of 1"),
        (
            {"result": [[{"text": "x"}]]},
            {},
            False,
            "no text at `text: document.contents` in an object with the keys text",
        ),
        ({"result": [["x"]]}, {"text": "a"}, False, 'no text at `text: a` in "x"'),
    ],
)
def test_an_answer_in_another_form_is_an_error_of_the_options(answer, options, infra, message):
    with WebServer(lambda request: answer) as server:
        with pytest.raises(ToolFault) as error:
            search(server.url, **options)
        assert error.value.infra == infra and message in str(error.value)
        with pytest.raises(UserError) as stopped:
            check(server.url, **options)
    assert message in str(stopped.value)


def test_a_run_asks_once_before_it_starts():
    with WebServer(lambda request: {"result": [DOCUMENTS]}) as server:
        assert check(server.url) == f"{server.url} answers"
    assert len(server.requests) == 1
    with WebServer(lambda request: (404, "")) as server, pytest.raises(UserError, match="HTTP 404.*correct `url`"):
        check(server.url)
    with pytest.raises(UserError, match="start the service, or correct `url`"):
        check(server.url, retries=0)


def test_the_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "s3cr3t")
    with WebServer(lambda request: {"result": [[{"document": {"contents": "your key is s3cr3t"}}]]}) as server:
        result = search(server.url, key_env="SEARCH_KEY", key_header="X-Key")
    assert server.requests[0].headers["X-Key"] == "s3cr3t" and result.text == "[1] your key is ***"
    monkeypatch.delenv("SEARCH_KEY")
    with pytest.raises(UserError, match="tool search: key_env: environment variable SEARCH_KEY is not set"):
        search(server.url, key_env="SEARCH_KEY")


def test_no_service_is_asked_where_no_episode_counts():
    tool = Search.make(Search.Options(url="http://127.0.0.1:9/x", key_env="MISSING"), Resources("w", online=False))
    assert asyncio.run(tool.execute({"query": "x"}, {})).text == "No results."


def test_a_request_is_filled_in_one_pass():
    template = {"a": ["{query}", {"b": "{top_k}"}], "c": "{query} top {top_k}", "d": 1, "e": None}
    assert filled(template, "{top_k}", 5) == {"a": ["{top_k}", {"b": 5}], "c": "{top_k} top 5", "d": 1, "e": None}


@pytest.mark.parametrize(
    ("path", "value"), [("", {"a": [{"b": 1}]}), ("a.0.b", 1), ("a.1", None), ("a.b", None), ("a.0.b.c", None)]
)
def test_a_path_leads_through_keys_and_positions(path, value):
    assert at({"a": [{"b": 1}]}, path) == value
