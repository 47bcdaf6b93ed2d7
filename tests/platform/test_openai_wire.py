from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from recipe.dag.platform.openai_wire import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    cut,
    messages_for_template,
    read,
    split_calls,
)

CALL = '<tool_call>\n{"name": "calc", "arguments": {"code": "1"}}\n</tool_call>'


def test_calls_are_split_from_the_text_before_them():
    content, calls = split_calls(f"First.\n{CALL}\n{CALL}", "call_")
    assert content == "First."
    assert [call["id"] for call in calls] == ["call_0", "call_1"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"code": "1"}
    assert split_calls(CALL, "c")[0] is None


@pytest.mark.parametrize(
    "text",
    ["no call", f"<think>{CALL}</think> done", f"<think>{CALL}", "<tool_call>{not json}</tool_call>",
     f"{CALL}<tool_call>[]</tool_call>", '<tool_call>{"arguments": {}}</tool_call>'],
)  # fmt: skip
def test_a_text_without_a_readable_call_stays_as_it_is(text):
    assert split_calls(text, "c") == (text, [])


def test_a_call_after_a_thought_is_one_and_the_thought_stays_in_the_text():
    content, calls = split_calls(f"<think>{CALL} no</think>yes {CALL}", "c")
    assert len(calls) == 1 and content == f"<think>{CALL} no</think>yes"


def test_a_text_is_cut_at_its_first_stop_string():
    assert cut("abcdef", ["ef", "cd"], keep=False) == ("ab", "cd")
    assert cut("abcdef", ["ef", "cd"], keep=True) == ("abcd", "cd")
    assert cut("abc", ["x"], keep=False) == ("abc", None)
    assert cut("abc", ["b", "bc"], keep=True) == ("abc", "bc")


def test_arguments_of_calls_reach_the_template_as_objects_and_parts_as_text():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{a"}}
    messages = messages_for_template(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        ]
    )
    assert messages[0]["content"] == "ab" and messages[1]["content"] == ""
    assert [call["function"]["arguments"] for call in messages[1]["tool_calls"]] == [{"a": 1}, "{a"]


@pytest.mark.parametrize(
    ("kind", "change", "param"),
    [
        (ChatRequest, {"messages": []}, "messages"),
        (ChatRequest, {"messages": "hi"}, "messages"),
        (ChatRequest, {"temperature": "hot"}, "temperature"),
        (ChatRequest, {"top_p": 0}, "top_p"),
        (ChatRequest, {"max_tokens": 0}, "max_tokens"),
        (ChatRequest, {"max_completion_tokens": 10**20}, "max_completion_tokens"),
        (ChatRequest, {"top_k": 10**20}, "top_k"),
        (ChatRequest, {"temperature": float("nan")}, "temperature"),
        (ChatRequest, {"repetition_penalty": 1e-300}, "repetition_penalty"),
        (ChatRequest, {"repetition_penalty": float("inf")}, "repetition_penalty"),
        (ChatRequest, {"seed": 2**64}, "seed"),
        (ChatRequest, {"stop_token_ids": [10**20]}, "stop_token_ids"),
        (ChatRequest, {"stop": ["x"] * 65}, "stop"),
        (CompletionRequest, {"prompt": [10**20]}, "prompt"),
        (ChatRequest, {"n": 0}, "n"),
        (ChatRequest, {"stream": True}, "stream"),
        (ChatRequest, {"stop": [""]}, "stop"),
        (ChatRequest, {"model": None}, "model"),
        (CompletionRequest, {"prompt": {"a": 1}}, "prompt"),
        (CompletionRequest, {"logprobs": 99}, "logprobs"),
    ],
)
def test_a_wrong_field_is_named(kind, change, param):
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "prompt": "a"} | change
    with pytest.raises(BadRequest) as error:
        read(kind, body)
    assert error.value.param == param and error.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("message", [{"content": "a"}, {"role": "user", "content": 3},
    {"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "tool_calls": [{}]}])  # fmt: skip
def test_a_message_that_no_template_can_render_is_refused(message):
    with pytest.raises(BadRequest, match=r"messages\[0\]"):
        messages_for_template([message])


def test_prompts_are_texts_or_ids_one_or_several():
    def prompts(prompt):
        return read(CompletionRequest, {"model": "m", "prompt": prompt}).prompts()

    assert prompts("a") == ["a"] and prompts([1, 2]) == [[1, 2]]
    with pytest.raises(BadRequest, match="prompt: at most"):
        prompts(["a"] * 5000)
    assert prompts(["a", "b"]) == ["a", "b"] and prompts([[1], [2]]) == [[1], [2]]
