"""OpenAI's wire format, which vLLM, SGLang, llama.cpp and most gateways speak too: `/chat/completions`, and
`/completions` for prompts of token ids.

Invariant: pure. A sampling parameter at its neutral value is not sent, since strict servers refuse keys that they do
not know; an answer that lacks what it must have is a ModelServerFault.

Source: platform.openai.com/docs/api-reference/chat and .../guides/error-codes; `stop_reason` and `matched_stop`,
`reasoning_content` and the wording of refusals are vLLM's (docs.vllm.ai, OpenAI-compatible server) and SGLang's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.dag.core.errors import ModelServerFault
from recipe.dag.remote.wire import Answer, Body, Ping, Refusal, count_in, error_in
from recipe.dag.types.context import Message
from recipe.dag.workflow.agent_schema import NEUTRAL

_NEUTRAL = {**NEUTRAL, "ignore_eos": False}
SEEDS = 1 << 31
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
    fields |= {"seed": sampling["seed"] % SEEDS} if "seed" in sampling else {}
    fields |= {key: sampling[key] for key, neutral in _NEUTRAL.items() if sampling.get(key, neutral) != neutral}
    return fields | ({"stop": list(sampling["stop"])} if sampling.get("stop") else {})


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


@dataclass(frozen=True, slots=True)
class OpenAIWire:
    """See the module."""

    official: bool = False
    """The server is OpenAI's own, whose newer models refuse `max_tokens`."""

    def path(self, model: str) -> str:
        return "/chat/completions"

    def headers(self, key: str | None) -> dict[str, str]:
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def ping(self, model: str) -> Ping:
        return Ping("GET", "/models")

    def body(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> Body:
        body = {"model": model, "messages": sendable(messages), **sampling_fields(sampling)}
        if self.official:
            body["max_completion_tokens"] = body.pop("max_tokens")
        body |= {"tools": list(tools)} if tools else {}
        return body | ({"chat_template_kwargs": dict(template)} if template else {})

    def temperature(self, body: Body) -> float | None:
        return body.get("temperature")

    def max_tokens(self, body: Body) -> int | None:
        return body.get("max_completion_tokens", body.get("max_tokens"))

    def limited(self, body: Body, max_tokens: int) -> Body:
        key = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        return {**body, key: max_tokens}

    def answer(self, answer: Body, where: str) -> Answer:
        choice = first_choice(answer, where)
        return Answer(message_of(choice, where), choice.stop_reason)

    def tokens(self, answer: Body) -> tuple[int, int]:
        usage = answer.get("usage")
        return count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")

    def refusal(self, status: int, text: str) -> Refusal:
        error = error_in(text)
        message, code = error["message"], str(error.get("code") or "")
        if status == 429 and code == "insufficient_quota":
            return Refusal(message, "quota")
        if code == "context_length_exceeded" or any(words in message.lower() for words in _TOO_LONG):
            return Refusal(message, "too_long", room_in(message))
        return Refusal(message)


_TOO_LONG = ("maximum context length", "context length", "longer than the model", "too many tokens", "max_model_len")
"""Parts of the messages by which servers say that a prompt is too long."""
_CONTEXT = re.compile(r"context length (?:is |of )?(\d+)")
_PROMPT = re.compile(r"(\d+) (?:tokens )?(?:input tokens|prompt tokens|(?:in|from) the (?:input|messages|prompt))")
_HAS = re.compile(r"(?:prompt has|messages resulted in) (\d+) tokens")


def room_in(message: str) -> int | None:
    """Return the tokens that a server's refusal says are left for a completion: the context's length minus the
    prompt's, at least 0; None if it does not name both."""
    context, prompt = _CONTEXT.search(message), _PROMPT.search(message) or _HAS.search(message)
    return max(0, int(context[1]) - int(prompt[1])) if context and prompt else None
