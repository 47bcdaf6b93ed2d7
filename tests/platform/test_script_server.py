"""A Python function behind OpenAI's interface: its answers, limits and errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.user_code import load_object
from recipe.dag.platform.script_server import ScriptServer, open_script
from tests.platform.test_openai_server import ask as ask_server

CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two"}]}


def ask(function: Any, *bodies: dict[str, Any], max_requests: int = 64) -> list[tuple[int, Any]]:
    return ask_server(ScriptServer(function, "m", max_requests), *(CHAT | body for body in bodies))


def last_content(messages: list[dict[str, Any]]) -> str:
    return f"said: {messages[-1]['content']}"


async def later(messages: list[dict[str, Any]]) -> str:
    await asyncio.sleep(0)
    return last_content(messages)


@pytest.mark.parametrize("function", [last_content, later])
def test_the_function_answers_and_words_count_as_tokens(function):
    [(status, answer)] = ask(function, {})
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "said: one two"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_limits_and_stop_strings_cut_the_text():
    [(_, short), (_, stopped)] = ask(last_content, {"max_tokens": 2}, {"stop": " two"})
    assert [short["choices"][0]["message"]["content"], short["choices"][0]["finish_reason"]] == ["said: one", "length"]
    assert stopped["choices"][0]["message"]["content"] == "said: one"


def test_n_choices_and_text_parts():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    [(_, answer)] = ask(last_content, {"messages": parts, "n": 3})
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["said: ab"] * 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_requests_beyond_the_limit_wait():
    running = [0, 0]

    async def counted(messages):
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.01)
        running[0] -= 1
        return "x"

    answers = ask(counted, *[{}] * 9, max_requests=2)
    assert [status for status, _ in answers] == [200] * 9 and running == [0, 2]


def test_the_function_cannot_change_the_next_ones_messages():
    def destroy(messages):
        text = messages[0]["content"]
        messages[0]["content"] = "gone"
        return text

    [(_, answer)] = ask(destroy, {"n": 2})
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one two"] * 2


def raising(messages: list[dict[str, Any]]) -> str:
    raise KeyError("score")


@pytest.mark.parametrize(
    ("function", "body", "status", "words"),
    [
        (raising, {}, 500, "KeyError: 'score'"),
        (lambda messages: 5, {}, 500, "the script returned int, not a text"),
        (last_content, {"model": "other"}, 404, "there is no model 'other'"),
        (last_content, {"messages": []}, 400, "messages"),
        (last_content, {"messages": [{"content": "x"}]}, 400, "has no role"),
        (last_content, {"stream": True}, 400, "does not stream"),
    ],
)
def test_failures_have_openais_form(function, body, status, words):
    [(received, answer)] = ask(function, body)
    assert received == status and words in answer["error"]["message"]


def test_a_reference_is_checked_when_the_server_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text("LIMIT = 5\ndef judge(messages):\n    return 'x'\n")
    assert open_script("judge.py:judge").app() is not None
    with pytest.raises(UserError, match="--script: .* is not a function"):
        open_script("judge.py:LIMIT")
    with pytest.raises(UserError, match="did you mean `judge`"):
        open_script("judge.py:juge")


@pytest.mark.parametrize(
    ("problem", "answer", "verdict"),
    [("2 + 3?", "5 (90 %)", "YES"), ("2 + 3?", "6", "NO"), ("4 * -3?", "-12", "YES"), ("Why?", "1", "NO")],
)
def test_the_gallerys_judge_reads_what_its_workflow_sends(problem, answer, verdict):
    judge = open_script("examples/gallery/judge.py:judge")
    agents = load_object("examples/gallery/agents.py", Path.cwd())
    context = SimpleNamespace(problem=problem, upstream={"solve": SimpleNamespace(text=answer)})
    [(_, said)] = ask(judge.function, {"messages": agents.Judge().prompt(context)})
    assert said["choices"][0]["message"]["content"] == verdict
