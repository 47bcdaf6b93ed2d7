from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.chat import as_ids, continuation_ids, end_of_turn_id, ignored_options, render
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from tests.dialogues import byte_tokenizer

# As published chat templates do: blanks are stripped, an answer's end differs by what follows it.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def real():
    return byte_tokenizer(TEMPLATE)


def test_render_gives_plain_ids(real):
    ids = render(real, [{"role": "user", "content": " hi "}])
    assert type(ids) is list and set(map(type, ids)) == {int}
    assert ids == real.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)


def test_a_continuation_is_what_the_template_puts_after_an_answer(real):
    end = end_of_turn_id(real)
    assert end == real.eos_token_id
    messages = [{"role": "tool", "content": "one <|im_end|> two"}, {"role": "tool", "content": "qzstandinanswerzq"}]
    ids = continuation_ids(real, messages, end_of_turn=end)
    expected = (
        "\n<|im_start|>tool\none <|im_end|> two<|im_end|>\n<|im_start|>tool\nqzstandinanswerzq<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids == real.encode(expected, add_special_tokens=False)


def test_a_base_models_end_of_text_is_not_its_end_of_turn(world):
    tokenizer = world.Tokenizer()
    tokenizer.eos_token_id = 99
    assert end_of_turn_id(tokenizer) == 2


def test_a_template_that_hides_answers_is_refused(world):
    tokenizer = world.Tokenizer()
    tokenizer.apply_chat_template = lambda conversation, **kwargs: "nothing"
    with pytest.raises(UserError, match="omits the assistant's messages"):
        end_of_turn_id(tokenizer)


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        ({"input_ids": [1, 2]}, [1, 2]),
        ({"input_ids": [[1, 2]]}, [1, 2]),
        ([], []),
        (np.array([1, 2]), [1, 2]),
        (np.array([[3]]), [3]),
        ([np.int64(4)], [4]),
        ([1.0], None),
        ([True], None),
        ([-1], None),
        ("12", None),
        (None, None),
        ([[1], [2]], None),
        ([{"role": "user"}], None),
    ],
)
def test_ids_are_read_in_every_form_that_tokenizers_give_them(value, ids):
    assert as_ids(value) == ids


THINKING = (
    TEMPLATE.replace("<think></think>", "")
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "<think>\n\n</think>\n\n{% endif %}"
)
"""With the switch of Qwen3's template: without thinking, answers begin after an empty thought."""


@pytest.mark.parametrize(
    ("template", "options", "unread"),
    [
        (THINKING, {"enable_thinking": False}, []),
        (THINKING, {"enable_thiking": False, "max_length": 9}, ["enable_thiking"]),
        (TEMPLATE, {"enable_thinking": False}, ["enable_thinking"]),
        ({"default": TEMPLATE, "tool_use": THINKING}, {"enable_thinking": False}, []),
        ("{% generation %}{% endgeneration %}", {"any": 1}, []),
        (None, {"any": 1}, []),
    ],
)
def test_options_that_a_template_does_not_read_are_found(template, options, unread):
    assert ignored_options(SimpleNamespace(chat_template=template), options) == unread


@pytest.mark.parametrize("thinks", [True, False])
def test_an_agent_switches_thinking_in_its_template(world, thinks):
    class Tokenizer(world.Tokenizer):
        chat_template = THINKING

        def apply_chat_template(self, conversation, *, enable_thinking=True, **options):
            return super().apply_chat_template(
                conversation, prefix="" if enable_thinking else "<think>\n\n</think>\n\n", **options
            )

    agent = {"chat_template_kwargs": {"enable_thinking": thinks}, "tools": ["calc"], "tool_loop": {"format": "fenced"}}
    text = "<think>try\n```python\n1\n```\n</think>\n```python\n2\n```\n"
    client = world.Client(lambda prompt, *_: "done" if "[2]" in prompt else text)
    endpoint = PolicyEndpoint(client, Tokenizer(), 4096)
    flow = world.workflow([{"id": "solve"}], agents=[agent])
    tools = {"calc": world.Tool("calc", lambda arguments, state: f"[{arguments['code'].strip()}]")}
    runner = EpisodeRunner(flow, {"main": endpoint}, tools, seed=0)
    episode = asyncio.run(runner.run({"prompt": [{"role": "user", "content": "?"}]}, "u", 0, step=0))
    assert [result.text for result in episode.calls[0].tool_results] == ["[2]"] and episode.calls[0].text == "done"
    assert all(prompt.endswith("</think>\n\n") is not thinks for _, prompt, _ in client.requests)
    assert len(client.requests) == 2 and not episode.calls[0].opened_thinking
    misspelt = world.workflow([{"id": "solve"}], agents=[{"chat_template_kwargs": {"enable_thiking": thinks}}])
    with pytest.raises(UserError, match="agent agent0: chat_template_kwargs.enable_thiking has no effect"):
        EpisodeRunner(misspelt, {"main": endpoint}, {}, seed=0)
