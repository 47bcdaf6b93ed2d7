"""The bodies of requests in OpenAI's form, and what their answers say.

Invariant: pure. A sampling parameter at its neutral value is not sent, since strict servers refuse keys that they do
not know; an answer that lacks what it must have is a ModelServerFault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.dag.errors import ModelServerFault
from recipe.dag.types.context import Message

_NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
}
_SEEDS = 1 << 31
"""Seeds are sent modulo this: some servers refuse larger ones."""
_REASONING = ("reasoning_content", "reasoning")
"""Keys under which servers return a thought that they cut from the text."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The first choice of an answer."""

    data: Mapping[str, Any]
    stop_reason: str
    """stop or length. A text that a content filter cut off counts as length, because the agent did not end it."""
    stop_string: str
    """The stop string that ended the generation, if the server says so and has removed it; otherwise empty."""


def sampling_fields(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return an agent's sampling parameters as fields of a request."""
    fields = {"temperature": sampling["temperature"], "max_tokens": sampling["max_tokens"]}
    fields["seed"] = sampling["seed"] % _SEEDS
    fields |= {key: sampling[key] for key, neutral in _NEUTRAL.items() if sampling.get(key, neutral) != neutral}
    return fields | ({"stop": list(sampling["stop"])} if sampling.get("stop") else {})


def with_extras(body: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with the user's fields; a field whose value is None there is removed."""
    return {key: value for key, value in {**body, **extras}.items() if key not in extras or value is not None}


def sendable(messages: Sequence[Message]) -> list[Message]:
    """Return messages without thoughts, which servers refuse or ignore in a prompt, and with arguments of tool calls
    that are JSON objects: a server that reads a model's mistake there again refuses every later request."""
    sent = [{key: value for key, value in message.items() if key not in _REASONING} for message in messages]
    for message in sent:
        if message.get("tool_calls"):
            message["tool_calls"] = [_sendable_call(call) for call in message["tool_calls"]]
    return sent


def _sendable_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        readable = isinstance(json.loads(function["arguments"]), dict)
    except (TypeError, ValueError, RecursionError):
        readable = False
    return {**call, "function": {**function, "arguments": function["arguments"] if readable else "{}"}}


def first_choice(answer: Mapping[str, Any], where: str) -> Choice:
    """Return the answer's first choice. Raises ModelServerFault."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        raise ModelServerFault("the answer has no choices", where=where)
    reason = choice.get("finish_reason")
    ended = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length"}
    ended["content_filter"] = "length"
    if reason not in ended:
        raise ModelServerFault(f"the answer has the finish_reason {str(reason)[:40]!r}", where=where)
    # vLLM's and SGLang's names; a number is a token
    matched = choice.get("stop_reason", choice.get("matched_stop"))
    return Choice(choice, ended[reason], matched if isinstance(matched, str) and reason == "stop" else "")


def message_of(choice: Choice, where: str) -> Message:
    """Return the assistant's message: content, tool_calls and reasoning_content as far as the server sent them, the
    content with the stop string that ended it. Raises ModelServerFault."""
    data = choice.data.get("message")
    content = data.get("content") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(content, str | None):
        raise ModelServerFault("the answer has no message with a text", where=where)
    text = content or ""
    message: Message = {"role": "assistant", "content": text}
    if choice.stop_string and not text.endswith(choice.stop_string):
        message["content"] = text + choice.stop_string
    calls = data.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            raise ModelServerFault("the answer has tool_calls in another form than OpenAI's", where=where)
        message["tool_calls"] = [_plain_call(call, number) for number, call in enumerate(calls)]
    for key in _REASONING:
        if isinstance(data.get(key), str) and data[key]:
            message["reasoning_content"] = data[key]
            break
    return message


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _plain_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a tool call with the keys that a server needs to read it again."""
    function = call["function"]
    arguments = function.get("arguments")
    return {
        "id": str(call.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": "{}" if arguments in (None, "") else arguments},
    }
