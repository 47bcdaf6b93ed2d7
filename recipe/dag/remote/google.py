"""Google's wire format: `generateContent`, of the Gemini API (key) and of Vertex AI (access token, other URL).

Invariant: pure. The agents' messages stay in OpenAI's form; here they become contents with parts: system texts apart,
a tool's results as function responses, and neighbours of one role joined. Parts that are thoughts are cut from the
text; how much a model thinks is set through `body: {generationConfig: {thinkingConfig: {thinkingBudget: 0}}}`. The
signature of a thought before a function call goes back with the call, as the API demands.

Google's OpenAI-compatible path would need no wire, but takes no `generationConfig`, which workflows set through `body`.

Source: ai.google.dev/api/generate-content, .../gemini-api/docs/function-calling, .../docs/thought-signatures and
.../docs/troubleshooting; cloud.google.com/vertex-ai/generative-ai/docs/model-reference/inference; refusals as quoted in
github.com/google-gemini/gemini-cli/issues/6678 and github.com/itcon-pty-au/stremio-ai-search/issues/147.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from recipe.dag.core.errors import ModelServerFault
from recipe.dag.remote.openai import SEEDS
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

_FILTERED = ("SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY", "OTHER")
_MALFORMED = ("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS")
"""The model's own mistakes: the answer has no text that it ended."""
_ENDS = {"STOP": "stop"} | dict.fromkeys(("MAX_TOKENS", *_FILTERED, *_MALFORMED), "length")
_SIGNATURE = "thought_signature"
"""The key of a recorded tool call under which the signature of the thought before it is kept."""
_TOO_LONG = re.compile(r"input token count.*exceeds the maximum number of tokens")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s")


def vertex_url(url: str) -> str:
    """Return the URL of Vertex AI; the location `global` has a host without its name."""
    return url.replace("//global-aiplatform.", "//aiplatform.")


@dataclass(frozen=True, slots=True)
class GoogleWire:
    """See the module."""

    vertex: bool = False

    def path(self, model: str) -> str:
        return f"{self._model(model)}:generateContent"

    def headers(self, key: str | None) -> dict[str, str]:
        if key is None:
            return {}
        return {"Authorization": f"Bearer {key}"} if self.vertex else {"x-goog-api-key": key}

    def ping(self, model: str) -> Ping:
        body = {"contents": [{"role": "user", "parts": [{"text": "ping"}]}]}
        return Ping("POST", f"{self._model(model)}:countTokens", body, names_model=True)

    def _model(self, model: str) -> str:
        name = quote(model.removeprefix("models/"), safe="/@")
        return f"/publishers/google/models/{name}" if self.vertex else f"/models/{name}"

    def body(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> Body:
        system = [{"text": message["content"]} for message in messages if message["role"] == "system"]
        body: Body = {
            "contents": joined(_turns([m for m in messages if m["role"] != "system"]), "parts"),
            "generationConfig": _generation(sampling),
        }
        body |= {"systemInstruction": {"parts": system}} if system else {}
        declared = [_declaration(tool["function"]) for tool in tools or ()]
        return body | ({"tools": [{"functionDeclarations": declared}]} if declared else {})

    def temperature(self, body: Body) -> float | None:
        return (body.get("generationConfig") or {}).get("temperature")

    def max_tokens(self, body: Body) -> int | None:
        return (body.get("generationConfig") or {}).get("maxOutputTokens")

    def limited(self, body: Body, max_tokens: int) -> Body:
        return {**body, "generationConfig": {**body.get("generationConfig", {}), "maxOutputTokens": max_tokens}}

    def answer(self, answer: Body, where: str) -> Answer:
        candidates = answer.get("candidates")
        candidate = candidates[0] if isinstance(candidates, list) and candidates else None
        if not isinstance(candidate, Mapping):
            feedback = answer.get("promptFeedback")
            if isinstance(feedback, Mapping) and feedback.get("blockReason"):
                return Answer({"role": "assistant", "content": ""}, "length")
            raise ModelServerFault("the answer has no candidates", where=where)
        reason = candidate.get("finishReason")
        if reason not in _ENDS:
            raise ModelServerFault(f"the answer has the finishReason {str(reason)[:40]!r}", where=where)
        content = candidate.get("content")
        raw = content.get("parts") if isinstance(content, Mapping) else None
        parts = [part for part in raw if isinstance(part, Mapping)] if isinstance(raw, list) else []
        message: Message = {"role": "assistant", "content": _text(parts, thought=False)}
        if calls := list(_calls(parts)):
            message["tool_calls"] = calls
        if thoughts := _text(parts, thought=True):
            message["reasoning_content"] = thoughts
        return Answer(message, _ENDS[reason])

    def tokens(self, answer: Body) -> tuple[int, int]:
        usage = answer.get("usageMetadata")
        read = count_in(usage, "promptTokenCount", "toolUsePromptTokenCount")
        return read, count_in(usage, "candidatesTokenCount", "thoughtsTokenCount")

    def refusal(self, status: int, text: str) -> Refusal:
        error = error_in(text)
        message, raw = error["message"], error.get("details")
        details = [detail for detail in raw if isinstance(detail, Mapping)] if isinstance(raw, list) else []
        if any(detail.get("reason") == "API_KEY_INVALID" for detail in details) or "API key not valid" in message:
            return Refusal(message, "key")  # with HTTP 400
        if _TOO_LONG.search(message):
            return Refusal(message, "too_long", 0)
        if status == 429 and any("PerDay" in quota for detail in details for quota in _quotas(detail)):
            return Refusal(message, "quota")  # the pause that it names would not help
        pauses = (_SECONDS.fullmatch(str(detail.get("retryDelay"))) for detail in details)
        return Refusal(message, after_s=next((float(pause[1]) for pause in pauses if pause), None))


def _quotas(detail: Mapping[str, Any]) -> Iterator[str]:
    violations = detail.get("violations")
    for violation in violations if isinstance(violations, list) else ():
        if isinstance(violation, Mapping):
            yield str(violation.get("quotaId"))


def _generation(sampling: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"temperature": sampling["temperature"], "maxOutputTokens": sampling["max_tokens"]}
    fields |= {"topP": sampling["top_p"]} if sampling.get("top_p", 1.0) < 1.0 else {}
    fields |= {"topK": sampling["top_k"]} if sampling.get("top_k", -1) > 0 else {}
    for key, name in (("presence_penalty", "presencePenalty"), ("frequency_penalty", "frequencyPenalty")):
        fields |= {name: sampling[key]} if sampling.get(key) else {}
    fields |= {"stopSequences": list(sampling["stop"])} if sampling.get("stop") else {}
    return fields | ({"seed": sampling["seed"] % SEEDS} if "seed" in sampling else {})


def _declaration(function: Mapping[str, Any]) -> dict[str, Any]:
    declared = {"name": function["name"], "description": function.get("description") or ""}
    # the older `parameters` knows a part of JSON Schema only, and refuses the rest
    return declared | ({"parametersJsonSchema": function["parameters"]} if function.get("parameters") else {})


def _turns(messages: Sequence[Message]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the role and the parts of each message."""
    for message, call in with_calls(messages):
        if message["role"] == "assistant":
            yield "model", _said(message)
        elif call is not None:
            response = {"result": message.get("content") or ""}
            yield "user", [{"functionResponse": {"name": call["function"]["name"], "response": response}}]
        else:
            yield "user", [{"text": plain_text(message)}]


def _said(message: Message) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"text": message["content"]}] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        part = {"functionCall": {"name": call["function"]["name"], "args": arguments_of(call)}}
        parts.append(part | ({"thoughtSignature": call[_SIGNATURE]} if _SIGNATURE in call else {}))
    return parts


def _text(parts: Sequence[Mapping[str, Any]], *, thought: bool) -> str:
    return "".join(str(part.get("text") or "") for part in parts if bool(part.get("thought")) is thought)


def _calls(parts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    asked = [part for part in parts if isinstance(part.get("functionCall"), Mapping)]
    for number, part in enumerate(asked):
        request = part["functionCall"]
        call = tool_call(number, str(request.get("name")), request.get("args"), request.get("id"))
        yield call | ({_SIGNATURE: part["thoughtSignature"]} if part.get("thoughtSignature") else {})
