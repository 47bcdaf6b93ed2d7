"""The interface of a provider's module, for the client that is common to all of them.

Invariant: a wire is pure. It makes the bodies of requests and reads those of answers and refusals; `transport` sends
them, repeats them and sorts the failures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from recipe.dag.types.context import Message

Body = dict[str, Any]
"""A request's or an answer's JSON object."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The next message of a model."""

    message: Message
    """In OpenAI's form, whatever the provider's: content, tool_calls, reasoning_content."""
    stop_reason: str
    """stop or length. A text that a content filter cut off or withheld counts as length: the agent did not end it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's message about a request that it does not answer."""

    message: str
    kind: Literal["key", "quota", "too_long", ""] = ""
    """key: the key is wrong. quota: nothing is left of what the account may use. too_long: the prompt, or the prompt
    with the wanted answer, exceeds the context. Empty: the HTTP status tells all."""
    room: int | None = None
    """too_long: the tokens that the context leaves for an answer, if the message tells them."""
    after_s: float | None = None
    """The pause that the body asks for before the next request."""


@dataclass(frozen=True, slots=True)
class Ping:
    """A free request that shows whether the server answers and accepts the key."""

    method: Literal["GET", "POST"]
    path: str
    body: Body | None = None
    names_model: bool = False
    """It asks about the model, so that 404 means that there is none of that name."""


class Wire(Protocol):
    """The requests and answers of one provider."""

    def path(self, model: str) -> str:
        """Return the path of a chat request, after the base URL."""
        ...

    def headers(self, key: str | None) -> dict[str, str]: ...

    def ping(self, model: str) -> Ping: ...

    def body(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> Body:
        """Return a chat request. `sampling` may lack a seed; `tools` have OpenAI's form; `template`: options of the
        server's chat template."""
        ...

    def temperature(self, body: Body) -> float | None:
        """Return the temperature that a request asks for; None if it leaves it to the server."""
        ...

    def max_tokens(self, body: Body) -> int | None:
        """Return the length of the answer that a request asks for."""
        ...

    def limited(self, body: Body, max_tokens: int) -> Body:
        """Return the request with another length of the answer."""
        ...

    def answer(self, answer: Body, where: str) -> Answer:
        """Raises ModelServerFault for an answer that cannot be read."""
        ...

    def tokens(self, answer: Body) -> tuple[int, int]:
        """Return the tokens of prompt and answer, thoughts included; 0 where the server reports none."""
        ...

    def refusal(self, status: int, text: str) -> Refusal:
        """Read the body of an answer whose HTTP status is not 200."""
        ...


def with_extras(body: Mapping[str, Any], extras: Mapping[str, Any]) -> Body:
    """Return a body with the user's fields. Objects are merged; a field whose value is None there is removed."""
    merged = dict(body)
    for key, value in extras.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            earlier = merged.get(key)
            merged[key] = with_extras(earlier if isinstance(earlier, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def count_in(counts: Any, *names: str) -> int:
    """Return the sum of the token counts of these names; missing and invalid ones count as 0."""
    values = (counts.get(name) for name in names) if isinstance(counts, Mapping) else ()
    return sum(value for value in values if isinstance(value, int) and value > 0)


def error_in(text: str) -> Mapping[str, Any]:
    """Return the `error` object of a refusal's body, or one with its text as the message. Servers in front of a model
    answer in forms of their own."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {"message": text}
    if isinstance(data, list) and data:  # Google's, from some of its front ends
        data = data[0]
    error = data.get("error", data) if isinstance(data, Mapping) else data
    if not isinstance(error, Mapping):
        return {"message": str(error)}
    return {"message": str(error.get("message") or error.get("detail") or text)} | {
        key: value for key, value in error.items() if key != "message"
    }


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tool call in OpenAI's form; empty if the model's JSON is no object."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def tool_call(number: int, name: str, arguments: Any, call_id: Any = None) -> dict[str, Any]:
    """Return a tool call in OpenAI's form. `arguments`: an object. `number`: the call's within its message."""
    text = json.dumps(arguments if isinstance(arguments, Mapping) else {})
    call = {"id": str(call_id or f"call_{number}"), "type": "function"}
    return call | {"function": {"name": name, "arguments": text}}


def with_calls(messages: Sequence[Message]) -> Iterator[tuple[Message, Mapping[str, Any] | None]]:
    """Yield each message with the tool call that it answers: one of the latest answer's; None for all others."""
    asked: dict[str, Mapping[str, Any]] = {}
    for message in messages:
        if message["role"] == "assistant":
            asked = {call["id"]: call for call in message.get("tool_calls") or ()}
        is_result = message["role"] == "tool"
        yield message, asked.get(message.get("tool_call_id", "")) if is_result else None


def plain_text(message: Message) -> str:
    """Return a message's text for a user's turn. A tool's result arrives here if the model wrote the call as text."""
    text = message.get("content") or ""
    return f"<tool_response>\n{text}\n</tool_response>" if message["role"] == "tool" else text


def joined(turns: Iterable[tuple[str, list[dict[str, Any]]]], key: str) -> list[dict[str, Any]]:
    """Return messages of alternating roles, whose contents are lists under `key`: neighbours of one role are joined,
    and empty answers, which these APIs refuse to read, are left out."""
    messages: list[dict[str, Any]] = []
    for role, content in turns:
        if not content:
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1][key] += content
        else:
            messages.append({"role": role, key: content})
    return messages
