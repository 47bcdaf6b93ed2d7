"""Renders messages as token ids, through the policy's chat template.

Invariant: a sampled answer is never rendered. The ids that follow it are found by rendering a placeholder answer and
taking the text after it, so the sampled ids stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.codec import TextCodec
from recipe.dag.types.context import Message

# A word that no template strips, escapes or treats as markup, and that no tool's schema contains.
_PLACEHOLDER = "qzstandinanswerzq"
_OPENING = {"role": "user", "content": "-"}
_TOKENIZER_OPTIONS = {"padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs"}
"""Arguments of apply_chat_template that are for the tokenizer, not for the template."""


async def render_off_loop(
    codec: TextCodec, tokenizer: Any, messages: Sequence[Message], tools: list[dict] | None = None, **kwargs: Any
) -> list[int]:
    """Do the same as `render`, but encode the text with `codec`."""
    if not codec.direct or not _TOKENIZER_OPTIONS.isdisjoint(kwargs):
        return render(tokenizer, messages, tools, **kwargs)
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
    )
    return await codec.encode(text)


def render(tokenizer: Any, messages: Sequence[Message], tools: list[dict] | None = None, **kwargs: Any) -> list[int]:
    """Return the ids of `messages` followed by the generation prompt. `kwargs` go to the template."""
    rendered = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False, **kwargs
    )
    return as_ids(rendered) or []


def as_ids(value: Any) -> list[int] | None:
    """Return the token ids in a hook's result: a list of ints, an array, or a tokenizer's BatchEncoding. None if it
    is something else."""
    if isinstance(value, Mapping):
        value = value.get("input_ids")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]  # a batch of one
    if not isinstance(value, list | tuple):
        return None
    return plain_ids(value)


def plain_ids(values: Sequence[Any]) -> list[int] | None:
    """Return token ids as Python integers; None if they are not token ids."""
    if set(map(type, values)) <= {int}:  # one check per type, not per token: prompts are long
        return list(values) if not values or min(values) >= 0 else None
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in values):
        return None
    ids = [int(token) for token in values]
    return ids if min(ids) >= 0 else None


def ignored_options(tokenizer: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the options of the chat template that it does not read, such as a misspelt `enable_thinking`. Without the
    source of the template, all count as read."""
    sources = template_sources(tokenizer)
    if not options or not sources:
        return []
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    read = set(_TOKENIZER_OPTIONS)
    try:
        for source in sources:
            read |= meta.find_undeclared_variables(environment.parse(source))
    except TemplateError:  # such as a tag that only transformers knows
        return []
    return [name for name in options if name not in read]


def template_sources(tokenizer: Any) -> list[str]:
    """Return the sources of the tokenizer's chat templates; [] unless all are texts."""
    templates = getattr(tokenizer, "chat_template", None)
    sources = list(templates.values()) if isinstance(templates, Mapping) else [templates]
    texts = [source for source in sources if isinstance(source, str)]
    return texts if len(texts) == len(sources) else []


def end_of_turn_id(tokenizer: Any, **kwargs: Any) -> int:
    """Return the token with which the template ends an assistant's message. Raises UserError if there is none."""
    ids = _ids_after_answer(tokenizer, [], None, generation_prompt=False, **kwargs)
    if not ids:
        raise UserError("the chat template puts no token after an assistant's message; tool_loop and memory need one")
    return tokenizer.eos_token_id if tokenizer.eos_token_id in ids else ids[0]


def continuation_ids(
    tokenizer: Any, messages: Sequence[Message], *, end_of_turn: int, tools: list[dict] | None = None, **kwargs: Any
) -> list[int]:
    """Return the ids between an answer's end-of-turn token and the first token of the next answer: `messages` (tool
    results, for example) and the generation prompt. Raises UserError if the template cannot render them."""
    return _after_turn(_ids_after_answer(tokenizer, messages, tools, generation_prompt=True, **kwargs), end_of_turn)


async def continue_off_loop(
    codec: TextCodec,
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    end_of_turn: int,
    tools: list[dict] | None = None,
    **kwargs: Any,
) -> list[int]:
    """Do the same as `continuation_ids`, but encode the text with `codec`."""
    text = _text_after_answer(tokenizer, messages, tools, generation_prompt=True, **kwargs)
    return _after_turn(await codec.encode(text), end_of_turn)


def calls_text(tokenizer: Any, calls: Sequence[Message], **kwargs: Any) -> str:
    """Return the text that the template puts between an assistant's content and the end of the turn for the tool
    `calls` of the message; "" if it omits them. Raises UserError if the template cannot render them."""
    options = {"generation_prompt": False, **kwargs}
    end = _text_after_answer(tokenizer, [], None, **options)
    text = _text_after_answer(tokenizer, [], None, calls=calls, **options)
    return text.removesuffix(end) if text != end else ""


def _after_turn(ids: list[int], end_of_turn: int) -> list[int]:
    if end_of_turn not in ids:
        raise UserError("the chat template does not end an assistant's message that another message follows")
    return ids[ids.index(end_of_turn) + 1 :]


def _ids_after_answer(tokenizer: Any, *args: Any, **kwargs: Any) -> list[int]:
    return list(tokenizer.encode(_text_after_answer(tokenizer, *args, **kwargs), add_special_tokens=False))


def _text_after_answer(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict] | None,
    *,
    generation_prompt: bool,
    calls: Sequence[Message] = (),
    **kwargs: Any,
) -> str:
    answer = {"role": "assistant", "content": _PLACEHOLDER, **({"tool_calls": list(calls)} if calls else {})}
    conversation = [_OPENING, answer, *messages]
    try:
        text = tokenizer.apply_chat_template(
            conversation, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
        )
    except Exception as error:
        roles = ", ".join(message["role"] for message in conversation)
        problem = f"the chat template cannot render the roles {roles}"
        raise UserError(f"{problem}: {type(error).__name__}: {error}") from error
    # The first occurrence counts: a tool's output after it may contain anything.
    _, placeholder, after = text.partition(_PLACEHOLDER)
    if not placeholder:
        raise UserError("the chat template omits the assistant's messages, which tool_loop and memory need")
    return after
