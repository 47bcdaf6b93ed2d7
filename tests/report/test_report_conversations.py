"""The published form of an evaluation: every key, valid conversations, errors apart from wrong answers."""

from __future__ import annotations

import json

import pytest

from recipe.dag.report.conversations import conversation, figures, write_conversations
from recipe.dag.report.pass_table import read_graded

ABOUT = {"model": "m", "n_samples": 2, "max_turns": 8, "max_concurrent_requests": 64, "max_concurrent_sandbox": 32}
METADATA = {*ABOUT, "total_problems", "total_samples", "accuracy", "pass_at_1"}
ITEM = set(
    "problem_id sample_id problem ground_truth predicted_answer final_response conversation_history turn_count "
    "correct".split()
)
OPENING = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}]
NATIVE = {
    "id": "chatcmpl-9f",
    "type": "function",
    "function": {"name": "code_interpreter", "arguments": '{"code": "1"}'},
}
HERMES = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "1"}}</tool_call>'


def reply(text: str, **fields) -> dict:
    return {"role": "tool", "name": "code_interpreter", "content": text, **fields}


def check_conversation(messages: list[dict]) -> None:
    """OpenAI's rules: an answer for each tool call, directly after its message, and no other message of a tool."""
    position = 0
    while position < len(messages):
        message, position = messages[position], position + 1
        assert message["role"] in ("system", "user", "assistant") and isinstance(message["content"], str)
        ids = [call["id"] for call in message.get("tool_calls", ())]
        assert len(set(ids)) == len(ids) and message.get("tool_calls") != []
        for call in message.get("tool_calls", ()):
            assert call["type"] == "function" and isinstance(call["function"]["arguments"], str)
            assert call["function"]["name"].replace("_", "").replace("-", "").isalnum()
        answers = messages[position : position + len(ids)]
        assert [(answer["role"], answer["tool_call_id"]) for answer in answers] == [("tool", id_) for id_ in ids]
        position += len(ids)


@pytest.fixture
def play(make_call, make_episode):
    def make(*messages: dict, uid: str = "val-0", index: int = 0, call: dict | None = None, **fields):
        made = make_call(messages=[*OPENING, *messages], **(call or {}))
        return make_episode(uid, index, calls=[made], **({"outcome": 1.0} | fields))

    return make


def test_the_file_has_every_published_key_in_the_order_of_the_problems(tmp_path, play, fault):
    episodes = [
        play({"role": "assistant", "content": "no"}, uid="val-1", index=1, outcome=0.0, info={"answer": "3"}),
        play(uid="val-1", outcome=None, fault=fault),
        play({"role": "assistant", "content": "2"}, index=1, info={"answer": "2"}),
        play({"role": "assistant", "content": "?"}, outcome=0.0, info={"answer": ""}),
    ]
    path = tmp_path / "retool_results.json"
    write_conversations(path, episodes, ["val-0", "val-1"], ABOUT)
    data = json.loads(path.read_text())
    assert METADATA <= data["metadata"].keys() and data["metadata"].items() >= ABOUT.items()
    items = data["results"]
    assert [(item["problem_id"], item["sample_id"]) for item in items] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(item.keys() - {"error"} == ITEM for item in items)
    assert [item["correct"] for item in items] == [False, True, False, False]
    assert [item["predicted_answer"] for item in items] == [None, "2", None, "3"]
    assert [item.get("error") for item in items] == [None, None, "sandbox fault in execute: connection refused", None]
    assert (items[1]["final_response"], items[1]["problem"], items[1]["ground_truth"]) == (
        "from solver",
        "problem val-0",
        "42",
    )
    graded = read_graded(path)
    assert (graded.problems, graded.errors) == ({"0": [False, True], "1": [False]}, 1)
    again = tmp_path / "again.json"
    write_conversations(again, episodes[::-1], ["val-0", "val-1"], ABOUT)
    assert again.read_bytes() == path.read_bytes()


def test_errors_are_no_wrong_answers(play, fault):
    episodes = [play(uid=f"val-{n}", index=i, outcome=float(n == 0 and i < 2)) for n in range(2) for i in range(4)]
    lost = [play(uid="val-1", index=i, outcome=None, fault=fault) for i in (4, 5)]
    found = figures([*episodes, *lost], problems=3)
    counts = ("total_problems", "total_samples", "graded", "correct", "wrong", "errors", "ungraded")
    assert [found[key] for key in counts] == [3, 10, 8, 2, 6, 2, 0]
    assert (found["accuracy"], found["accuracy_of"]) == (0.25, "2 of 8 graded samples")
    assert found["most_frequent_error"].endswith("(2 of 2)")
    assert (found["pass_at_1"], found["avg@n"]) == (pytest.approx(0.25), pytest.approx(0.25))
    assert found["pass@k"] == pytest.approx({"1": 0.25, "2": (1 - 1 / 6) / 2, "3": 0.5, "4": 0.5})
    low, high = found["pass_at_1_interval"]
    assert found["pass@k_interval"]["1"] == [low, high] and 0 < low < 0.25 < high < 1
    assert found["pass@k_problems"] == {str(k): 2 for k in range(1, 5)}


def test_without_a_graded_episode_there_is_no_accuracy(play, fault):
    found = figures([play(outcome=None, fault=fault), play(index=1, outcome=None)], problems=1)
    assert (found["accuracy"], found["pass_at_1"], found["pass@k"]) == (None, None, {})
    assert (found["errors"], found["ungraded"], found["wrong"]) == (1, 1, 0)


def test_native_tool_calls_keep_their_answers_and_get_ids_that_every_run_repeats(play):
    asks = {"role": "assistant", "content": "", "tool_calls": [NATIVE, {**NATIVE, "id": "other"}]}
    answer = {"role": "assistant", "content": "2"}
    replies = [reply("first", tool_call_id="chatcmpl-9f"), reply("second", tool_call_id="other")]
    history = conversation(play(asks, *replies, asks, *replies, answer))
    check_conversation(history)
    assert [message["content"] for message in history if message["role"] == "tool"] == ["first", "second"] * 2
    ids = [call["id"] for message in history for call in message.get("tool_calls", ())]
    assert ids == ["call_0_0", "call_0_1", "call_1_0", "call_1_1"]


def test_arguments_are_text_and_names_are_acceptable(play):
    functions = [{"name": "a tool!", "arguments": {"x": "ü"}}, {"name": "", "arguments": None}]
    asks = {"role": "assistant", "content": "", "tool_calls": [{"id": "", "function": f} for f in functions]}
    history = conversation(play(asks, reply("unknown"), reply("unknown")))
    check_conversation(history)
    assert [call["function"] for call in history[2]["tool_calls"]] == [
        {"name": "a_tool_", "arguments": '{"x": "ü"}'},
        {"name": "unreadable", "arguments": "{}"},
    ]


def test_tool_calls_in_the_text_become_tool_calls(play):
    text = f"<think>{HERMES}</think>I compute.\n{HERMES}\n<tool_call>{{not json</tool_call>"
    asks = {"role": "assistant", "content": text}
    history = conversation(play(asks, reply("1"), reply("unreadable", name=""), {"role": "assistant", "content": "2"}))
    check_conversation(history)
    assert [call["function"]["name"] for call in history[2]["tool_calls"]] == ["code_interpreter", "unreadable"]
    assert json.loads(history[2]["tool_calls"][1]["function"]["arguments"]) == {"text": "{not json"}
    assert "I compute." in history[2]["content"] and history[2]["content"].count("<tool_call>") == 0


@pytest.mark.parametrize(
    ("call", "fields", "reason"),
    [
        ({"ended_in_tool_call": True, "stop_reason": "max_generations"}, {}, "no further turn was left"),
        ({"stop_reason": "length"}, {}, "the message was cut off"),
    ],
)
def test_a_call_that_was_not_run_is_answered(play, call, fields, reason):
    asks = {"role": "assistant", "content": "", "tool_calls": [NATIVE, NATIVE]}
    history = conversation(play(asks, call=call, **fields))
    check_conversation(history)
    assert [message["content"] for message in history[-2:]] == [f"not run: {reason}"] * 2


def test_a_call_that_a_fault_interrupted_is_answered(play, fault):
    asks = {"role": "assistant", "content": "", "tool_calls": [NATIVE]}
    history = conversation(play(asks, outcome=None, fault=fault))
    check_conversation(history)
    assert history[-1]["content"].startswith("not run: sandbox fault")


def test_an_episode_without_a_call_has_its_problem(make_episode, fault):
    history = conversation(make_episode("val-0", calls=[], fault=fault))
    check_conversation(history)
    assert [message["role"] for message in history] == ["system", "user"]
