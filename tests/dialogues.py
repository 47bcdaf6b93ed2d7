"""Tokenizers with chat templates, and dialogues with tool calls, for tests of what a rollout and a data set make of
them."""

from __future__ import annotations

import json
import random
from typing import Any

SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs a program.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python"}},
            "required": ["code"],
        },
    },
}
# Like Qwen2.5's: a default system prompt, schemas in it, calls as JSON in tags, neighbouring tool results in one turn.
QWEN = """\
{%- set first = messages[0] -%}
{%- set system = first.content if first.role == 'system' else 'You are a helpful assistant.' -%}
{{- '<|im_start|>system\n' + system -}}
{%- if tools -%}
  {{- '\n\n# Tools\n\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools>\n\nCall one as <tool_call>\n{"name": <name>, "arguments": <JSON object>}\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- elif m.role == 'assistant' and m.tool_calls -%}
    {{- '<|im_start|>assistant' -}}
    {%- if m.content -%}{{- '\n' + m.content -}}{%- endif -%}
    {%- for call in m.tool_calls -%}
      {%- set f = call.function -%}
      {{- '\n<tool_call>\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif m.role != 'system' or not loop.first -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# Like Llama 3's: blanks around a message are removed, and its calls are JSON without tags.
LLAMA = """\
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\n\n' -}}
  {%- if m.tool_calls -%}
    {{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": '
        + (m.tool_calls[0].function.arguments | tojson) + '}' -}}
  {%- else -%}{{- m.content | trim -}}{%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n\n' -}}{%- endif -%}
"""


def tokenizer(template: str | None = QWEN) -> Any:
    """A Qwen2 tokenizer with merges learned from a few words, so that texts have more than one encoding."""
    from recipe.tiny.dialogue import Demonstration
    from recipe.tiny.tokenizer import build_tokenizer

    texts = [
        "print(12 * 34) \n\n def answer(x):\n    return x\n",
        '{"name": "code_interpreter", "arguments": {"code": "',
    ]
    made = build_tokenizer([Demonstration("a", ({"role": "user", "content": text},), text) for text in texts], 400)
    made.chat_template = template
    return made


def byte_tokenizer(template: str | None) -> Any:
    """A Qwen2 tokenizer with one token per byte, so that every text can be encoded and none has two encodings."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Qwen2Tokenizer(vocabulary, [], unk_token=None, eos_token=tokens[2], pad_token=tokens[0])
    made.add_special_tokens({"additional_special_tokens": [tokens[1]]})
    made.chat_template = template
    return made


def call_of(code: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": code}}}


def dialogue(seed: int) -> list[dict[str, Any]]:
    """A problem, one to three calls with their results, an answer; some with a system message or a second problem."""
    chance = random.Random(seed)
    messages: list[dict[str, Any]] = []
    if chance.random() < 0.5:
        messages.append({"role": "system", "content": "Use the tool."})
    for _ in range(chance.choice([1, 1, 2])):
        a, b = chance.randrange(1000), chance.randrange(1000)
        messages.append({"role": "user", "content": f"What is {a} * {b}?\n"})
        for _ in range(chance.randrange(1, 4)):
            code = f'x = {a} * {b}\nprint("é {{}}".format(x))'
            words = chance.choice(["", "I compute it.", " Let me see:\n\n"])
            messages.append({"role": "assistant", "content": words, "tool_calls": [call_of(code)]})
            messages.append({"role": "tool", "name": "code_interpreter", "content": f"é {a * b}\n"})
        messages.append({"role": "assistant", "content": f"It is {a * b}.\n<answer>{a * b}</answer>"})
    return messages


def write_parquet(path: Any, dialogues: list[list[dict[str, Any]]], tools: Any = None, **columns: list) -> str:
    """Write `messages` and `tools` (the same for all) as a user's file would have them."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"messages": messages, "tools": tools} for messages in dialogues]
    table = pa.Table.from_pylist(rows)
    for name, values in columns.items():
        table = table.append_column(name, [values])
    parquet.write_table(table, path)
    return str(path)


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same dialogue with the arguments of its calls as JSON text."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copied


def save_model(folder: Any, template: str = QWEN) -> str:
    """Write a tiny Qwen2 with random weights, and its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    made = tokenizer(template)
    config = Qwen2Config(
        vocab_size=-(-len(made) // 64) * 64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)
