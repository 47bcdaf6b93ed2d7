"""Messages to token ids, through the policy's own chat template.

Invariant: a sampled answer is never rendered. What follows it is found by rendering a stand-in answer and taking what
the template puts behind that, so the ids before stay as they were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from recipe.dag.episode.codec import TextCodec
from recipe.dag.episode.context import Message
from recipe.dag.errors import UserError

# Nothing that a template strips, escapes or treats as markup, and nothing that a tool's schema would contain.
_STAND_IN = "qzstandinanswerzq"
_OPENING = {"role": "user", "content": "-"}


_TOKENIZER_OPTIONS = {"padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs"}
"""Arguments of apply_chat_template that its tokenizer gets, not the template."""


async def render_off_loop(
    codec: TextCodec, tokenizer: Any, messages: Sequence[Message], tools: list[dict] | None = None, **kwargs: Any
) -> list[int]:
    """`render`, with the text encoded by `codec`."""
    if not codec.direct or not _TOKENIZER_OPTIONS.isdisjoint(kwargs):
        return render(tokenizer, messages, tools, **kwargs)
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
    )
    return await codec.encode(text)


def render(tokenizer: Any, messages: Sequence[Message], tools: list[dict] | None = None, **kwargs: Any) -> list[int]:
    """The ids of `messages` with the generation prompt behind them. `kwargs` go to the template."""
    rendered = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False, **kwargs
    )
    return as_ids(rendered) or []


def as_ids(value: Any) -> list[int] | None:
    """Token ids out of what hooks return: a list of ints, an array, or a tokenizer's BatchEncoding. None: no ids."""
    if isinstance(value, Mapping):
        value = value.get("input_ids")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    if not isinstance(value, list | tuple):
        return None
    return plain_ids(value)


def plain_ids(values: Sequence[Any]) -> list[int] | None:
    """Return token ids as Python's own integers; None if they are not token ids."""
    if set(map(type, values)) <= {int}:  # a check per kind and not per token: prompts are long
        return list(values) if not values or min(values) >= 0 else None
    if not all(isinstance(token, Integral) and not isinstance(token, bool) and token >= 0 for token in values):
        return None
    return [int(token) for token in values]


def end_of_turn_id(tokenizer: Any, **kwargs: Any) -> int:
    """The token that the template ends an assistant's message with. Raises UserError where there is none."""
    ids = _behind_answer(tokenizer, [], None, generation_prompt=False, **kwargs)
    if not ids:
        raise UserError("the chat template ends an assistant's message with no token: tool loops need one that does")
    return tokenizer.eos_token_id if tokenizer.eos_token_id in ids else ids[0]


def continuation_ids(
    tokenizer: Any, messages: Sequence[Message], *, end_of_turn: int, tools: list[dict] | None = None, **kwargs: Any
) -> list[int]:
    """What stands between a finished answer, its end-of-turn token included, and the next answer's first token:
    `messages` (tool results) and the generation prompt. Raises UserError if the template cannot show them."""
    return _after_turn(_behind_answer(tokenizer, messages, tools, generation_prompt=True, **kwargs), end_of_turn)


async def continue_off_loop(
    codec: TextCodec,
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    end_of_turn: int,
    tools: list[dict] | None = None,
    **kwargs: Any,
) -> list[int]:
    """`continuation_ids`, with the text encoded by `codec`."""
    text = _text_behind_answer(tokenizer, messages, tools, generation_prompt=True, **kwargs)
    return _after_turn(await codec.encode(text), end_of_turn)


def _after_turn(ids: list[int], end_of_turn: int) -> list[int]:
    if end_of_turn not in ids:
        raise UserError("the chat template does not end an assistant's message where tool results follow it")
    return ids[ids.index(end_of_turn) + 1 :]


def _behind_answer(tokenizer: Any, *args: Any, **kwargs: Any) -> list[int]:
    return list(tokenizer.encode(_text_behind_answer(tokenizer, *args, **kwargs), add_special_tokens=False))


def _text_behind_answer(
    tokenizer: Any, messages: Sequence[Message], tools: list[dict] | None, *, generation_prompt: bool, **kwargs: Any
) -> str:
    conversation = [_OPENING, {"role": "assistant", "content": _STAND_IN}, *messages]
    try:
        text = tokenizer.apply_chat_template(
            conversation, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
        )
    except Exception as error:
        roles = ", ".join(message["role"] for message in conversation)
        raise UserError(f"the chat template cannot show the roles {roles}: {type(error).__name__}: {error}") from error
    # The first one: a tool's output behind it may contain anything.
    _, found, behind = text.partition(_STAND_IN)
    if not found:
        raise UserError("the chat template leaves out what the assistant said: tool loops need one that shows it")
    return behind
