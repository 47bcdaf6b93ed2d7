"""An API policy as agents use it: through messages, or through token ids if it has a tokenizer.

Invariant: an answer is returned as the server gave it, with its usage; what is sent is the agent's sampling parameters,
seed included, and the workflow's `body`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.episode.chat import plain_ids
from recipe.dag.episode.remote.requests import first_choice, message_of, sampling_fields, sendable, with_extras
from recipe.dag.episode.remote.transport import Transport
from recipe.dag.episode.remote.usage import Usage, usage_of
from recipe.dag.types.context import Message
from recipe.dag.types.model import Api
from recipe.dag.types.record import Generation

GENERATION_S = 600.0
"""Time limit of a request whose caller has one of its own."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer of a chat completion."""

    message: Message
    stop_reason: str
    usage: Usage


@dataclass(slots=True)
class ChatEndpoint:
    """An API policy that reads messages. It has no tokenizer."""

    api: Api
    name: str
    """The server's name of the model."""
    transport: Transport
    tokenizer: None = field(default=None, init=False)

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: dict[str, Any],
        *,
        timeout_s: float,
        tools: list[dict[str, Any]] | None = None,
        template: dict[str, Any] | None = None,
    ) -> ChatAnswer:
        """Return the model's next message. `template`: options of the server's chat template. Raises ModelServerFault
        and UserError, as `Transport.post` does."""
        body = {"model": self.name, "messages": sendable(messages), **sampling_fields(sampling)}
        body |= {"tools": tools} if tools else {}
        body |= {"chat_template_kwargs": template} if template else {}
        answer, tries = await self.transport.post_fitting(
            "/chat/completions", with_extras(body, self.api.body), timeout_s=self.api.timeout_s or timeout_s
        )
        choice = first_choice(answer, self.transport.where)
        message = message_of(choice, self.transport.where)
        return ChatAnswer(message, choice.stop_reason, usage_of(answer, tries, self.api.price))


class CompletionsClient:
    """A GenerationClient over `/completions`, with token ids as prompt.

    A server that returns no token ids returns text, which is encoded again: the ids may then differ from the sampled
    ones, which nothing but the agent's own continuation reads.
    """

    repeats = True
    """It repeats requests itself."""

    def __init__(self, api: Api, *, name: str, transport: Transport, tokenizer: Any, end_of_turn: int):
        self._api, self._name, self.transport = api, name, transport
        self._tokenizer, self._end_of_turn = tokenizer, end_of_turn

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        body = {"model": self._name, "prompt": prompt_ids, "logprobs": 1, **sampling_fields(sampling)}
        # vLLM's and SGLang's ways to keep what tool calls and stop strings need
        body |= {"return_token_ids": True, "skip_special_tokens": False}
        if sampling.get("stop"):
            body |= {"include_stop_str_in_output": True, "no_stop_trim": True}
        answer, tries = await self.transport.post_fitting(
            "/completions", with_extras(body, self._api.body), timeout_s=self._api.timeout_s or GENERATION_S
        )
        choice = first_choice(answer, self.transport.where)
        ids = self._ids(choice.data, choice.stop_reason, choice.stop_string)[: sampling["max_tokens"]]
        logprobs = choice.data.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        known = isinstance(values, list) and len(values) == len(ids) and None not in values
        usage = usage_of(answer, tries, self._api.price)
        return Generation(ids, values if known and values else [0.0] * len(ids), choice.stop_reason, usage=usage)

    def _ids(self, data: Any, stop_reason: str, stop_string: str) -> list[int]:
        ids = data.get("token_ids")
        if isinstance(ids, list) and plain_ids(ids) is not None:
            return ids
        text = data.get("text")
        text = text if isinstance(text, str) else ""
        if stop_string and not text.endswith(stop_string):
            text += stop_string
        encoded = list(self._tokenizer.encode(text, add_special_tokens=False))
        ended = stop_reason == "stop" and not stop_string and encoded[-1:] != [self._end_of_turn]
        return [*encoded, self._end_of_turn] if ended else encoded
