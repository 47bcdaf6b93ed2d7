"""The tiny models' chat template, and texts that are one token."""

from __future__ import annotations

import pytest

from recipe.dag.episode.tool_loop import Request, requests_in
from recipe.dag.workflow.agent_schema import ToolLoop
from recipe.tiny.dialogue import Demonstration
from recipe.tiny.tokenizer import build_tokenizer

LESSONS = [Demonstration("solve", ({"role": "user", "content": f"What is {n} + 1?"},), str(n + 1)) for n in range(40)]
TOOL = {"type": "function", "function": {"name": "calc", "description": "Über 1 < 2", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(LESSONS, segments=["tool\n", "a segment of two words"])


def render(tokenizer, *messages, **options) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def test_messages_without_tools_are_role_and_content(tokenizer):
    text = render(tokenizer, {"role": "user", "content": "hi"}, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"


def test_tools_come_first_as_json(tokenizer):
    text = render(tokenizer, {"role": "user", "content": "hi"}, tools=[TOOL])
    schema = '{"type": "function", "function": {"name": "calc", "description": "Über 1 < 2", "parameters": {}}}'
    assert text == f"<|im_start|>tools\n{schema}<|im_end|><|im_start|>user\nhi<|im_end|>"


@pytest.mark.parametrize("arguments", [{"code": 'print("<1>")'}, '{"code": "print(\\"<1>\\")"}'])
def test_a_call_is_written_as_the_tool_loop_reads_it(tokenizer, arguments):
    call = {"type": "function", "function": {"name": "calc", "arguments": arguments}}
    text = render(tokenizer, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert requests_in(text, ToolLoop(), ("calc",)) == [Request("calc", {"code": 'print("<1>")'})]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_a_segment_is_one_token(tokenizer):
    assert len(tokenizer.encode("a segment of two words", add_special_tokens=False)) == 1
