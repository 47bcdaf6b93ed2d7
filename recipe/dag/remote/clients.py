"""An API policy as agents use it: through messages, or through token ids if it has a tokenizer.

Invariant: an answer is returned as the server gave it, with its usage; what is sent is the agent's sampling parameters,
seed included, and the workflow's `body`. With a cache, equal requests of one process are paid for once, also those that
are made while the first is under way.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from recipe.dag.core.errors import Fault, UserError
from recipe.dag.core.time_limit import waiting
from recipe.dag.endpoint.chat import plain_ids
from recipe.dag.endpoint.client import ChatAnswer
from recipe.dag.remote.cache import Cache, cache_key
from recipe.dag.remote.openai import Choice, first_choice, sampling_fields
from recipe.dag.remote.transport import Transport
from recipe.dag.remote.wire import Body, with_extras
from recipe.dag.types.context import Message
from recipe.dag.types.model import Api
from recipe.dag.types.record import Generation
from recipe.dag.types.usage import Usage, usage_of

GENERATION_S = 600.0
"""Time limit of a request whose caller sets its own."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Questions:
    """Asks a server, or the cache for what it has answered before."""

    api: Api
    transport: Transport
    cache: Cache | None = None
    _under_way: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[str]] = field(
        default_factory=dict, init=False, repr=False
    )
    """By event loop and key of the cache: the JSON text that will be the answer."""

    async def ask(
        self,
        path: str,
        form: Callable[[Mapping[str, Any]], Body],
        sampling: Mapping[str, Any],
        read: Callable[[Body], T],
        *,
        timeout_s: float,
    ) -> tuple[T, Usage]:
        """Return what `read` makes of the answer, and its usage.

        form: makes a request's body from sampling parameters, which may lack the seed.
        timeout_s: for each request, unless the workflow sets another limit.

        Raises ModelServerFault and UserError, as `Transport.post` does."""
        wire, body = self.transport.wire, with_extras(form(sampling), self.api.body)

        async def post() -> tuple[Body, int]:  # what cannot be read is not kept
            limit = self.api.timeout_s or timeout_s
            return await self.transport.post_fitting(path, body, timeout_s=limit, read=read)

        try:
            if self.cache is None:
                answer, tries = await post()
            else:
                # greedy answers do not depend on the seed; sampled ones must differ between siblings
                seedless = with_extras(form({k: v for k, v in sampling.items() if k != "seed"}), self.api.body)
                seed = None if wire.temperature(body) == 0 else sampling.get("seed")
                key = cache_key(self.api.provider or "openai", self.transport.url, path, seedless, seed)
                answer, tries = await self._once(self.cache, key, post)
            value = read(answer)
        except (Fault, asyncio.CancelledError):
            self.transport.account.add(failed=1)
            raise
        if tries == 0:
            self.transport.account.add(cache_hits=1)
        return value, usage_of(wire.tokens(answer), tries, self.api)

    async def _once(self, cache: Cache, key: str, post: Callable[[], Awaitable[tuple[Body, int]]]) -> tuple[Body, int]:
        """Return the answer and the number of requests that it took: 0 if it is in the cache, or if an equal request
        was under way. Its failure is that of all who wait for it; if it is cancelled, one of them asks instead."""
        loop = asyncio.get_running_loop()
        while (first := self._under_way.get((loop, key))) is not None:
            with waiting():
                await asyncio.wait({first})
            if first.cancelled():
                continue
            if (failure := first.exception()) is not None:
                raise copy.copy(failure) from failure  # each caller adds to its own
            return json.loads(first.result()), 0
        own = self._under_way[loop, key] = loop.create_future()
        try:
            answer, tries = await cache.get(key), 0
            if answer is None:
                answer, tries = await post()
                await cache.put(key, json.dumps(answer))
            own.set_result(json.dumps(answer))
        except (Fault, UserError) as failure:
            own.set_exception(failure)
            own.exception()  # asyncio logs one that is not retrieved, and perhaps no task waits
            raise
        finally:
            own.cancel()  # without an effect once it is set
            del self._under_way[loop, key]
        return answer, tries


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A ChatEndpoint over the server's chat path."""

    name: str
    """The server's name of the model."""
    questions: Questions

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: dict[str, Any],
        *,
        timeout_s: float,
        tools: list[dict[str, Any]] | None = None,
        template: dict[str, Any] | None = None,
    ) -> ChatAnswer:
        transport = self.questions.transport
        wire, where = transport.wire, transport.where
        answer, usage = await self.questions.ask(
            wire.path(self.name),
            lambda options: wire.body(self.name, messages, options, tools=tools, template=template),
            sampling,
            lambda received: wire.answer(received, where),
            timeout_s=timeout_s,
        )
        return ChatAnswer(answer.message, answer.stop_reason, usage)


class CompletionsClient:
    """A GenerationClient over `/completions`, with token ids as prompt.

    A server that returns no token ids returns text, which is encoded again: the ids may then differ from the sampled
    ones, which nothing but the agent's own continuation reads.
    """

    repeats = True
    """It repeats requests itself."""

    def __init__(self, questions: Questions, *, name: str, tokenizer: Any, end_of_turn: int):
        self.questions, self._name = questions, name
        self._tokenizer, self._end_of_turn = tokenizer, end_of_turn

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        def form(options: Mapping[str, Any]) -> Body:
            body = {"model": self._name, "prompt": prompt_ids, "logprobs": 1, **sampling_fields(options)}
            # vLLM's and SGLang's ways to keep what tool calls and stop strings need
            body |= {"return_token_ids": True, "skip_special_tokens": False}
            return body | ({"include_stop_str_in_output": True, "no_stop_trim": True} if options.get("stop") else {})

        def read(answer: Body) -> Choice:
            return first_choice(answer, self.questions.transport.where)

        choice, usage = await self.questions.ask("/completions", form, sampling, read, timeout_s=GENERATION_S)
        ids = self._ids(choice.data, choice.stop_reason, choice.stop_string)[: sampling["max_tokens"]]
        logprobs = choice.data.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        known = isinstance(values, list) and len(values) == len(ids) and None not in values
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
