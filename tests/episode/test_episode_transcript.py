from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.tool_loop import Request, requests_in
from recipe.dag.episode.transcript import TranscriptEncoder, plain_messages, plain_tools
from recipe.dag.types.markup import after_thinking
from recipe.dag.types.record import Generation
from recipe.dag.workflow.agent_schema import ToolLoop
from recipe.tiny.tokenizer import DIALECTS
from tests.dialogues import LLAMA, QWEN, SCHEMA, call_of, dialogue, tokenizer

THINKING = "{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
FIRST = 12
"""Seeds of dialogues to replay."""


class Scripted:
    """A server whose model says `answers`, one after the other, each ended by its end-of-turn token."""

    def __init__(self, made, answers):
        self.made, self.answers = made, iter(answers)

    async def generate(self, request_id, prompt_ids, sampling):
        text = next(self.answers)
        ids = [*self.made.encode(text, add_special_tokens=False), self.made.eos_token_id]
        return Generation(ids, [-0.5] * len(ids), "stop", 0)


def said(message) -> str:
    """What a model writes for an assistant's message, spelled out by hand."""
    calls = []
    for call in message.get("tool_calls", []):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(f'<tool_call>\n{{"name": "code_interpreter", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join([*([message["content"]] if message["content"] else []), *calls])


def replay(world, made, messages, *, max_parallel=1):
    """Play the dialogue as an episode of one agent with a tool, and return its call."""
    prompt = messages[: next(i for i, m in enumerate(messages) if m["role"] == "assistant")]
    results = iter([message["content"] for message in messages if message["role"] == "tool"])
    answers = [said(message) for message in messages if message["role"] == "assistant"]
    agent = {
        "tools": ["code_interpreter"],
        "tool_loop": {"max_parallel": max_parallel},
        "sampling": {"max_tokens": 4096},
    }
    hook = "def pre_process(tokenizer, prompt_ids, obs, *, context):\n    return context.sample['prompt']\n"
    node = {"id": "solve", "hooks": "hook.py"}
    flow = world.workflow([node], agents=[agent], files={"hook.py": hook})
    tool = world.Tool("code_interpreter", lambda arguments, state: next(results))
    tool_class = type("Tool", (), {"schema": SCHEMA, "name": tool.name, "execute": tool.execute, "close": tool.close})
    endpoint = PolicyEndpoint(Scripted(made, answers), made, 65_536)
    runner = EpisodeRunner(flow, {"main": endpoint}, {tool.name: _bound(tool, tool_class)}, seed=0)
    episode = asyncio.run(runner.run({"prompt": prompt, "ground_truth": "1"}, "u", 0, step=0))
    assert episode.fault is None, episode.fault
    return episode.calls[0]


def _bound(tool, tool_class):
    made = tool_class.__new__(tool_class)
    made.execute, made.close = tool.execute, tool.close
    return made


def one_problem(seed: int):
    """A dialogue of `tests.dialogues` up to its first final answer, which is where an agent's call ends."""
    messages = dialogue(seed)
    last = next(i for i, m in enumerate(messages) if m["role"] == "assistant" and "tool_calls" not in m)
    return messages[: last + 1]


TINY = DIALECTS["qwen"].template()
PLAIN = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
"""Omits calls."""


@pytest.mark.parametrize("template", [QWEN, TINY, LLAMA, PLAIN], ids=["qwen", "tiny", "llama", "plain"])
def test_a_replayed_dialogue_has_the_ids_and_the_mask_of_the_data_set(world, template):
    made = tokenizer(template)
    encoder = TranscriptEncoder(made)
    for seed in range(FIRST):
        messages = one_problem(seed)
        call = replay(world, made, messages)
        encoded = encoder.encode(plain_messages(messages), [SCHEMA])
        assert encoded.ids == call.prompt_ids + call.response_ids
        assert encoded.mask == [0] * len(call.prompt_ids) + call.response_mask


def test_calls_of_one_message_and_their_results_are_those_of_a_rollout(world):
    made = tokenizer()
    messages = [
        {"role": "user", "content": "two at once"},
        {"role": "assistant", "content": "both", "tool_calls": [call_of("1"), call_of("2")]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "done"},
    ]
    call = replay(world, made, messages, max_parallel=2)
    encoded = TranscriptEncoder(made).encode(plain_messages(messages), [SCHEMA])
    assert encoded.ids == call.prompt_ids + call.response_ids
    assert encoded.mask == [0] * len(call.prompt_ids) + call.response_mask


def test_the_mask_covers_what_the_model_says_and_the_end_of_its_turns():
    made = tokenizer()
    messages = one_problem(1)
    encoded = TranscriptEncoder(made).encode(messages, [SCHEMA])
    parts: list[list[int]] = []
    for token, bit, before in zip(encoded.ids, encoded.mask, [0, *encoded.mask], strict=False):
        if bit:
            parts = [*parts[:-1], [*parts[-1], token]] if before else [*parts, [token]]
    assert [made.decode(part) for part in parts] == [
        said(message) + "<|im_end|>" for message in messages if message["role"] == "assistant"
    ]
    assert encoded.mask[-1] == 1 and encoded.ids[-1] == made.eos_token_id


def test_a_template_that_omits_calls_gets_them_in_the_form_that_the_loop_reads():
    assert TranscriptEncoder(tokenizer(QWEN)).calls_by_template
    assert not TranscriptEncoder(tokenizer(LLAMA)).calls_by_template
    assert TranscriptEncoder(tokenizer(TINY)).calls_by_template
    assert not TranscriptEncoder(tokenizer(PLAIN)).calls_by_template


def test_a_prompt_that_opens_a_thought_is_not_opened_twice():
    prompt = "'<|im_start|>assistant\n' -}}{%- endif"
    assert prompt in QWEN
    made = tokenizer(QWEN.replace(prompt, "'<|im_start|>assistant\n<think>\n' -}}{%- endif"))
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n1"}]
    text = made.decode(TranscriptEncoder(made).encode(messages).ids)
    assert text.endswith("assistant\n<think>\nhm\n</think>\n1<|im_end|>")


@pytest.mark.parametrize("template", [QWEN, LLAMA])
@pytest.mark.parametrize(
    ("content", "before"),
    [
        ("I compute", "\n</think>\n\nI compute"),
        ("", "\n</think>\n\n"),
        ("<think>\nhm\n</think>\n\nI compute", "hm\n</think>\n\nI compute"),
        ("<think>\nhm", "hm\n</think>\n\n"),
        ("I <think>hm</think> compute", "\n</think>\n\nI <think>hm</think> compute"),
    ],
)
def test_calls_and_answers_are_outside_the_thought_that_a_prompt_opens(template, content, before):
    made = tokenizer(template[: template.rindex("{{-")] + THINKING)
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": content, "tool_calls": [call_of("1")]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "<answer>1</answer>"},
    ]
    encoder = TranscriptEncoder(made)
    assert encoder.calls_by_template is (template is QWEN)
    ids, mask = encoder.encode(messages, [SCHEMA])
    first, last = spans(made, ids, mask)
    assert first.startswith(before if before.endswith("\n") else f"{before}\n<tool_call>")
    assert last == "\n</think>\n\n<answer>1</answer>"
    (request,) = requests_in(first, ToolLoop(format="hermes"), ("code_interpreter",), opened_thinking=True)
    assert request == Request("code_interpreter", {"code": "1"})
    assert after_thinking(last, opened=True).strip() == "<answer>1</answer>"


def spans(made, ids, mask) -> list[str]:
    """The text of each answer, without the end of its turn."""
    sampled = [token if trained else -1 for token, trained in zip(ids, mask, strict=True)]
    groups = [list(group) for trained, group in itertools.groupby(sampled, lambda token: token >= 0) if trained]
    return [made.decode(group[:-1]) for group in groups]


def test_nulls_that_parquet_adds_are_removed_and_tool_results_are_named():
    raw = [
        {"role": "user", "content": "x", "tool_calls": None, "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "b", "function": {"name": "search", "arguments": {"code": None, "query": "q"}}},
                {"id": "c", "function": {"name": "code_interpreter", "arguments": '{"code": "1"}'}},
            ],
        },
        {"role": "tool", "content": "r2", "tool_call_id": "c"},
        {"role": "tool", "content": [{"type": "text", "text": "r1"}], "tool_call_id": "b", "tool_calls": None},
    ]
    user, assistant, second, first = plain_messages(raw)
    assert user == {"role": "user", "content": "x"}
    assert assistant["content"] == ""
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"query": "q"}, {"code": "1"}]
    assert (second["name"], first["name"], first["content"]) == ("code_interpreter", "search", "r1")


def test_tools_may_be_json_text_or_mappings():
    assert plain_tools(json.dumps([SCHEMA])) == [SCHEMA] == plain_tools([SCHEMA | {"strict": None}])
    assert plain_tools([json.dumps(SCHEMA)]) == [SCHEMA]
    assert plain_tools(None) is None and plain_tools("") is None and plain_tools([]) is None


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "no messages"),
        ("text", "no messages"),
        ([{"content": "x"}], "message 1: {role, content}"),
        ([{"role": "user", "content": 3}], "message 1: its content is not text"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "a tool call must be"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "are not JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}], "not a mapping"),
    ],
)
def test_messages_that_no_dialogue_has_are_named(messages, problem):
    with pytest.raises(UserError, match=problem.replace("{", r"\{").replace("}", r"\}")):
        plain_messages(messages)


def test_a_dialogue_that_no_rollout_could_have_is_refused():
    encoder = TranscriptEncoder(tokenizer())
    with pytest.raises(UserError, match="no assistant's message"):
        encoder.encode([{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="first message"):
        encoder.encode([{"role": "assistant", "content": "x"}])


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match="no chat template"):
        TranscriptEncoder(tokenizer(None))
