"""Anthropic's wire format: `/messages`.

Invariant: pure. The agents' messages stay in OpenAI's form; here they become blocks: system texts apart, a tool's
results in the user's message after the call, and neighbours of one role joined, since an answer must follow its call
directly. There is no seed. Thoughts (`body: {thinking: {type: enabled, budget_tokens: 1024}}`) are cut from the text;
those before a tool call are signed, and go back with it, as the API demands.

Source: platform.claude.com/docs/en/api/messages, .../api/errors, .../build-with-claude/handling-stop-reasons and
.../extended-thinking; the messages of refusals as quoted in github.com/docker/docker-agent/issues/569 and
github.com/anthropics/claude-code/issues/12186.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.dag.core.errors import ModelServerFault
from recipe.dag.remote.wire import (
    Answer,
    Body,
    Ping,
    Refusal,
    arguments_of,
    count_in,
    error_in,
    joined,
    plain_text,
    tool_call,
    with_calls,
)
from recipe.dag.types.context import Message

VERSION = "2023-06-01"
_ENDS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "length",
    "pause_turn": "length",
}
_THOUGHTS = "thinking_blocks"
"""The key of a recorded message under which its signed thoughts are kept."""
_CROWDED = re.compile(r"exceed context limit: (\d+) \+ \d+ > (\d+)")


@dataclass(frozen=True, slots=True)
class AnthropicWire:
    """See the module."""

    def path(self, model: str) -> str:
        return "/messages"

    def headers(self, key: str | None) -> dict[str, str]:
        return {"anthropic-version": VERSION} | ({} if key is None else {"x-api-key": key})

    def ping(self, model: str) -> Ping:
        return Ping("GET", f"/models/{model}", names_model=True)

    def body(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> Body:
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        body: Body = {
            "model": model,
            "messages": joined(_turns([m for m in messages if m["role"] != "system"]), "content"),
            "max_tokens": sampling["max_tokens"],
            "temperature": sampling["temperature"],
        }
        body |= {"system": system} if system else {}
        body |= {"top_p": sampling["top_p"]} if sampling.get("top_p", 1.0) < 1.0 else {}
        body |= {"top_k": sampling["top_k"]} if sampling.get("top_k", -1) > 0 else {}
        body |= {"stop_sequences": list(sampling["stop"])} if sampling.get("stop") else {}
        return body | ({"tools": [_tool(tool["function"]) for tool in tools]} if tools else {})

    def temperature(self, body: Body) -> float | None:
        return body.get("temperature")

    def max_tokens(self, body: Body) -> int | None:
        return body.get("max_tokens")

    def limited(self, body: Body, max_tokens: int) -> Body:
        return {**body, "max_tokens": max_tokens}

    def answer(self, answer: Body, where: str) -> Answer:
        content, reason = answer.get("content"), answer.get("stop_reason")
        if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
            raise ModelServerFault("the answer has no content", where=where)
        if reason not in _ENDS:
            raise ModelServerFault(f"the answer has the stop_reason {str(reason)[:40]!r}", where=where)
        text = "".join(str(block.get("text") or "") for block in content if block.get("type") == "text")
        stopped_by = answer.get("stop_sequence")
        if reason == "stop_sequence" and isinstance(stopped_by, str) and not text.endswith(stopped_by):
            text += stopped_by  # stop strings stay in an agent's text
        message: Message = {"role": "assistant", "content": text}
        uses = [block for block in content if block.get("type") == "tool_use"]
        if uses:
            message["tool_calls"] = [
                tool_call(number, str(block.get("name")), block.get("input"), block.get("id"))
                for number, block in enumerate(uses)
            ]
        thoughts = [dict(block) for block in content if block.get("type") in ("thinking", "redacted_thinking")]
        if thinking := "\n".join(str(block["thinking"]) for block in thoughts if block.get("thinking")):
            message["reasoning_content"] = thinking
        if uses and thoughts:
            message[_THOUGHTS] = thoughts
        return Answer(message, _ENDS[reason])

    def tokens(self, answer: Body) -> tuple[int, int]:
        usage = answer.get("usage")
        # what is read from or written to the provider's prompt cache is not in input_tokens
        read = count_in(usage, "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        return read, count_in(usage, "output_tokens")

    def refusal(self, status: int, text: str) -> Refusal:
        message = error_in(text)["message"]
        if status == 400 and "credit balance is too low" in message:
            return Refusal(message, "quota")
        if "prompt is too long" in message:
            return Refusal(message, "too_long", 0)
        if crowded := _CROWDED.search(message):
            return Refusal(message, "too_long", max(0, int(crowded[2]) - int(crowded[1])))
        # 413 is a limit of bytes, which only a prompt beyond every context reaches
        return Refusal(message, "too_long", 0) if status == 413 else Refusal(message)


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description") or "", "input_schema": schema}


def _turns(messages: Sequence[Message]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the role and the blocks of each message."""
    for message, call in with_calls(messages):
        if message["role"] == "assistant":
            yield "assistant", _said(message)
        elif call is not None:
            text = message.get("content") or ""
            yield "user", [{"type": "tool_result", "tool_use_id": call["id"], "content": text}]
        else:
            yield "user", [{"type": "text", "text": plain_text(message)}]


def _said(message: Message) -> list[dict[str, Any]]:
    text = message.get("content") or ""
    uses = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments_of(call)}
        for call in message.get("tool_calls") or ()
    ]
    thoughts = message.get(_THOUGHTS, []) if uses else []
    return [*thoughts, *([{"type": "text", "text": text}] if text.strip() else []), *uses]
