"""Requests and answers of the OpenAI server: what a body may hold, and what an answer looks like.

Invariant: pure. A body is read completely before anything is generated: a field of the wrong kind or beyond its bounds
is a BadRequest with the field's name, in OpenAI's form; fields that this server does not know are ignored, as other
servers do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipe.dag.types.markup import TOOL_CALL, after_thinking


class BadRequest(Exception):
    """A request that cannot be answered: HTTP status, OpenAI's error code and the field, if it is one's fault."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's JSON form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


MOST_CHOICES = 4096
"""Of one request: its prompts times `n`."""
_GREEDY = 1e-5
"""Lower temperatures are 0, as in vLLM: logits divided by them overflow."""
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class _Sampled(BaseModel):
    """Fields that both kinds of completions have."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str
    max_tokens: _Count | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100.0)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    n: int | None = Field(default=None, ge=1, le=128)
    stream: bool | None = None
    return_token_ids: bool | None = None
    """As in vLLM: the answer holds `prompt_token_ids` and, in each choice, `token_ids`."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that were given, named as in the engine."""
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
        names += ("repetition_penalty", "ignore_eos", "stop_token_ids")
        parameters = {name: getattr(self, name) for name in names}
        if self.temperature is not None and self.temperature < _GREEDY:
            parameters["temperature"] = 0.0
        return {name: value for name, value in parameters.items() if value is not None}

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatRequest(_Sampled):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: _Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None


class CompletionRequest(_Sampled):
    prompt: str | list[_TokenId] | list[str] | list[list[_TokenId]]
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: Literal[False] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts of the request, each a text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) * (self.n or 1) > MOST_CHOICES:
                raise BadRequest(f"prompt: at most {MOST_CHOICES} choices in one request", param="prompt")
            return list(prompt)  # pyright: ignore[reportReturnType]  # lists of one kind
        return [prompt]  # pyright: ignore[reportReturnType]  # a text or token ids


Body = TypeVar("Body", bound=_Sampled)


def read(kind: type[Body], data: Any) -> Body:
    """Return the request in a decoded body. Raises BadRequest."""
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        request = kind.model_validate(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"][:1])
        raise BadRequest(f"{name}: {first['msg']}", param=name or None) from None
    if request.stream:
        raise BadRequest("this server does not stream; send the request without `stream`", param="stream")
    return request


def messages_for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: text parts joined, and the arguments of tool calls as objects.
    Raises BadRequest."""
    return [_for_template(message, index) for index, message in enumerate(messages)]


def _for_template(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where, read_message = f"messages[{index}]", dict(message)
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}: has no role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadRequest(f"{where}: only text parts are supported", param="messages")
        content = "".join(map(str, parts))
    if not isinstance(content, str | None):
        raise BadRequest(f"{where}: content must be text", param="messages")
    read_message["content"] = content or ""
    calls = message.get("tool_calls")
    if calls:
        read_message["tool_calls"] = [_call_for_template(call, where) for call in calls]
    else:
        read_message.pop("tool_calls", None)
    return read_message


def _call_for_template(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: a tool call needs function.name", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a template may render the text as it is
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def split_calls(text: str, prefix: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text before the first tool call and the calls in OpenAI's form; calls in thoughts are none. If one
    cannot be read, the whole text is returned, with no call: the client sees what the model wrote. `prefix`: of ids."""
    blocks = TOOL_CALL.findall(after_thinking(text))
    calls = [_openai_call(block, f"{prefix}{number}") for number, block in enumerate(blocks)]
    readable = [call for call in calls if call is not None]
    if not readable or len(readable) < len(calls):
        return text, []
    # a thought may hold the same call, so the first one is the last place from which all of them follow
    starts = [match.start() for match in TOOL_CALL.finditer(text)]
    first = max(start for start in starts if TOOL_CALL.findall(after_thinking(text[start:])) == blocks)
    return text[:first].strip() or None, readable


def _openai_call(block: str, call_id: str) -> dict[str, Any] | None:
    try:
        data = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", {})
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": data["name"], "arguments": arguments}}


def cut(text: str, stops: Sequence[str], *, keep: bool) -> tuple[str, str | None]:
    """Return the text up to the first stop string, which it contains only if `keep`, and that string or None."""
    positions = [(text.index(stop), stop) for stop in stops if stop in text]
    if not positions:
        return text, None
    position, stop = min(positions, key=lambda pair: (pair[0], -len(pair[1])))
    return text[: position + (len(stop) if keep else 0)], stop


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
