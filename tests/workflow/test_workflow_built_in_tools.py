"""The options of built-in tools in a workflow file: each mistake at its place, without a server."""

from __future__ import annotations

import pytest

GOOD = """\
dag_id: demo
tools:
  search: {kwargs: {folder: texts, top_k: 2}}
  wiki: {name: search, kwargs: {url: "http://host/retrieve", called: wiki}, workers: 4}
  notes: {name: mcp, kwargs: {url: "${oc.env:NOTES_URL,http://host/mcp}", tools: [read]}, description: Read.}
agents:
  - {name: left, policy: main, tools: [search, notes, calculator], tool_loop: {}}
  - {name: right, policy: main, tools: [{name: search, kwargs: {top_k: 5}}, wiki, notes], tool_loop: {}}
policies: {main: {model: {path: m}}}
nodes:
  - {id: l, agent: left}
  - {id: r, agent: right}
  - {id: score, reward: "rewards.py:score", after: [l, r]}
"""
CASES = [
    ("no folder", ("folder: texts", "folder: §nowhere"), "no such folder `nowhere`; looked in"),
    (
        "neither",
        ("{kwargs: {folder: texts, top_k: 2}}", "§{kwargs: {top_k: 2}}"),
        "either a `folder` of texts or the `url`",
    ),
    ("option of the other kind", ("top_k: 2", "retries: §2"), "has no effect with `folder`; remove it"),
    ("misspelt", ("top_k: 2", "§topk: 2"), "did you mean `top_k`?"),
    ("out of bounds", ("top_k: 2", "top_k: §0"), "at least 1, got 0"),
    ("by agent", ("{top_k: 5}", "{retries: §5}"), "has no effect with `folder`; remove it"),
    (
        "by agent, both",
        ("{name: search, kwargs: {top_k: 5}}", '§{name: search, kwargs: {url: "http://h"}}'),
        "either a",
    ),
    ("url", ('"http://host/retrieve"', "§host:8000"), "expected a URL such as"),
    ("key in the url", ('"http://host/retrieve"', '§"http://host/x?key=1"'), "name the variable with the key"),
    ("key", ("called: wiki", "key_env: §sk-123"), "expected the name of an environment variable"),
    ("request", ("called: wiki", "request: §{q: x}"), "must contain the text {query}"),
    ("interpolation", ('"${oc.env:NOTES_URL,', '§"${NOTES_URL,'), "write `${oc.env:NAME}`"),
    ("no url", ('url: "${oc.env:NOTES_URL,http://host/mcp}", ', ""), "missing; this key is required"),
    ("one text for several", (", tools: [read]}, description", "}, §description"), "several tools would share it"),
    ("option of the interpreter", ("workers: 4", "§memory_mb: 4"), "`search` has no such option"),
    ("calculator", ("notes, calculator]", "notes, {name: calculator, kwargs: {§digit: 3}}]"), "did you mean `digits`?"),
]


@pytest.fixture(autouse=True)
def texts(folder):
    (folder / "texts").mkdir()


def test_options_are_read_without_a_server(load_text):
    left, right = load_text(GOOD).agents
    assert [tool.kwargs.get("top_k") for tool in (left.tools[0], right.tools[0])] == [2, 5]
    assert right.tools[0].kwargs["folder"] == "texts"


@pytest.mark.parametrize(("edits", "message"), [pytest.param(case[1:-1], case[-1], id=case[0]) for case in CASES])
def test_one_mistake_is_one_problem_at_its_place(edits, message, expect_one_problem, request):
    if request.node.callspec.id == "no url":
        edits = (*edits, ("kwargs: {tools: [read]}", "kwargs: §{tools: [read]}"))
    expect_one_problem(GOOD, edits, message)


def test_a_request_that_outlasts_the_call_is_reported(load_text):
    text = GOOD.replace("called: wiki", "called: wiki, request_timeout_s: 200")
    (warning,) = load_text(text).warnings
    assert "request_timeout_s" in warning.where and "episode.call_timeout_s ends the call" in warning.message
