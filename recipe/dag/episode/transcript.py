"""Encodes a finished dialogue as the token ids and mask that a rollout of the same dialogue would have.

Invariant: the ids are put together as a call's (`token_model.py`): the first prompt is rendered, an answer is its own
text and the end-of-turn token, and what follows an answer is rendered after it. The mask is 1 for the tokens that a
model would sample, the end of the turn included, and 0 for all others. No answer is rendered by the chat template,
which may rewrite earlier turns; a tool call is written in a form that the tool loop reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.chat import calls_text, continuation_ids, end_of_turn_id, render
from recipe.dag.episode.tool_loop import Request, requests_in
from recipe.dag.types.context import Message
from recipe.dag.types.markup import OPEN_TAG, ends_in_thought
from recipe.dag.workflow.agent_schema import ToolLoop

ASSISTANT = "assistant"
CLOSED = "\n</think>\n\n"
"""Ends a thought that the prompt opened: what templates write for an answer without a thought."""
_PROBE = Request("probe", {"a": "1"})


class Encoded(NamedTuple):
    """A dialogue as token ids, up to the end of its last answer."""

    ids: list[int]
    mask: list[int]
    """1 for each token that a model would sample; as long as `ids`."""


class TranscriptEncoder:
    """Encodes dialogues for one tokenizer. `template_kwargs` go to its chat template."""

    def __init__(self, tokenizer: Any, **template_kwargs: Any) -> None:
        """Raises UserError if the tokenizer has no chat template, or one that cannot continue a dialogue."""
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("the tokenizer has no chat template, which turns messages into tokens")
        self._tokenizer, self._options = tokenizer, template_kwargs
        self._end_of_turn = end_of_turn_id(tokenizer, **template_kwargs)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "-"}], tokenize=False, add_generation_prompt=True, **template_kwargs
        )
        self._opens_thinking = prompt.rstrip().endswith(OPEN_TAG)
        self.calls_by_template = self._reads_own_calls()
        """Whether tool calls are in the template's own form. If the tool loop cannot read that form, or the template
        omits calls, they are in the hermes form: JSON in <tool_call> tags."""

    def encode(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> Encoded:
        """Encode a dialogue. `tools`: schemas that its prompt shows. Raises UserError for one that no rollout could
        produce, and if the template cannot render it."""
        answers = [position for position, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not answers:
            raise UserError("no assistant's message")
        if answers[0] == 0:
            raise UserError("the first message is the assistant's; a user's must come before it")
        try:
            ids = render(self._tokenizer, messages[: answers[0]], tools, **self._options)
        except Exception as error:
            raise UserError(f"the chat template cannot render it: {type(error).__name__}: {error}") from error
        mask = [0] * len(ids)
        for position, following in zip(answers, [*answers[1:], None], strict=True):
            answer = [*self._encode(self._answer_text(messages[position])), self._end_of_turn]
            ids += answer
            mask += [1] * len(answer)
            if following is not None:
                options = {"end_of_turn": self._end_of_turn, "tools": tools, **self._options}
                between = continuation_ids(self._tokenizer, messages[position + 1 : following], **options)
                ids += between
                mask += [0] * len(between)
        return Encoded(ids, mask)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _answer_text(self, message: Message) -> str:
        calls = message.get("tool_calls") or []
        content = self._outside_thought(message.get("content") or "", calls=bool(calls))
        if not calls:
            return content
        if self.calls_by_template:
            text = calls_text(self._tokenizer, calls, **self._options)
        else:
            bodies = (json.dumps(call["function"], ensure_ascii=False) for call in calls)
            text = "".join(f"\n<tool_call>\n{body}\n</tool_call>" for body in bodies)
        return content + (text if content and not content.endswith(CLOSED) else text.lstrip("\n"))

    def _outside_thought(self, content: str, *, calls: bool) -> str:
        """Return what a model writes for `content` after a prompt that may open a thought. A content without a thought
        ends it first, and one with `calls` that does not end its own thought ends it before them: neither calls nor
        answers count inside one."""
        if not self._opens_thinking:
            return content
        if (start := content.lstrip()).startswith(OPEN_TAG):  # the prompt has the tag already
            content = start.removeprefix(OPEN_TAG).removeprefix("\n")
            return content + CLOSED if calls and ends_in_thought(content, opened=True) else content
        return CLOSED + content if ends_in_thought(content, opened=True) else content

    def _reads_own_calls(self) -> bool:
        function = {"name": _PROBE.name, "arguments": _PROBE.arguments}
        try:
            text = calls_text(self._tokenizer, [{"type": "function", "function": function}], **self._options)
        except UserError:
            return False
        answer = self._outside_thought("", calls=True) + text
        loop = ToolLoop(format="hermes")
        return requests_in(answer, loop, (_PROBE.name,), opened_thinking=self._opens_thinking) == [_PROBE]


def plain_messages(messages: Any) -> list[Message]:
    """Return a dialogue's messages in the form that chat templates expect.

    Parquet gives every message every key: those that are null are removed, also in the arguments of calls. Arguments
    that are JSON text are parsed, and a tool's message without a name gets that of its call. Raises UserError.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError("no messages: a list of {role, content} is needed")
    plain: list[Message] = []
    names: dict[str, str] = {}
    waiting: list[str] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"message {number}: {{role, content}} is needed")
        cleaned = {key: value for key, value in message.items() if value is not None}
        cleaned["content"] = _text(cleaned.get("content"), number)
        if calls := cleaned.pop("tool_calls", None):
            cleaned["tool_calls"] = [_plain_call(call, number) for call in calls]
            waiting = [call["function"]["name"] for call in cleaned["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in cleaned["tool_calls"] if "id" in call}
        if cleaned["role"] == "tool":
            called = waiting.pop(0) if waiting else None
            name = names.get(cleaned.get("tool_call_id", ""), called)
            if name is not None:
                cleaned.setdefault("name", name)
        plain.append(cleaned)
    return plain


def plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tool schemas from a list of mappings, or from JSON text; None if there are none. Raises UserError."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"tools: not JSON: {error}") from error
    elif tools is not None:
        tools = [json.loads(tool) if isinstance(tool, str) else _without_nulls(tool) for tool in tools]
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("tools: a list of function schemas is needed")
    return tools


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UserError(f"message {number}: its content is not text")
    return content


def _plain_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"message {number}: a tool call must be {{function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise UserError(f"message {number}: the arguments of {function['name']} are not JSON: {error}") from error
    arguments = _without_nulls(arguments) if arguments is not None else {}
    if not isinstance(arguments, dict):
        raise UserError(f"message {number}: the arguments of {function['name']} are not a mapping")
    kept = {"id": call["id"]} if call.get("id") is not None else {}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
