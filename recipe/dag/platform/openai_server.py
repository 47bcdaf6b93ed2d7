"""`verl-dag serve`: a model on the CPU behind OpenAI's interface.

Invariant: a choice depends on its prompt, its sampling parameters and its seed, never on the requests beside it (see
`generator`). Choice k of a request with a seed has the seed plus k. Every failure is an answer in OpenAI's error form.
Nothing is generated for a client that has closed its connection. Prompts are rendered, with the model's own template,
and encoded off the event loop, so that a long one delays no other request.

/v1/models, /v1/chat/completions, /v1/completions (a text or token ids, or several of them), /health. Tool calls in
hermes form (JSON inside <tool_call> tags) become `tool_calls` if the request has `tools` and the model's chat template
can render `tool_calls`, so that the client can send them back; otherwise they stay in the text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import dataclass
from itertools import count
from typing import Any

from aiohttp import web

from recipe.dag.core.errors import UserError
from recipe.dag.platform.generator import Request
from recipe.dag.platform.openai_http import answer_to, application, body_of, check_model
from recipe.dag.platform.openai_wire import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    cut,
    messages_for_template,
    split_calls,
    usage,
)
from recipe.dag.platform.rollout_server import RolloutServer
from recipe.dag.types.record import Generation

DEFAULT_MAX_LEN = 8192
"""Largest context by default: the cache of a longer one may not fit into memory."""
COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of /v1/completions."""
MOST_CHARACTERS = 256
"""Of a token; vocabularies have runs of up to 128 spaces. A longer prompt exceeds the context without being encoded."""


class LocalServer(RolloutServer):
    """The CPU rollout server, with outputs that need no verl."""

    @staticmethod
    def _output(request: Request, stop_reason: str, version: int) -> Any:
        return Generation(request.response_ids, request.log_probs, stop_reason, version)


@dataclass(frozen=True, slots=True)
class _Text:
    ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    stop: str | int | None
    """The stop string or token that ended it."""


class OpenAIServer:
    """The routes over one model."""

    def __init__(self, server: LocalServer, tokenizer: Any, name: str) -> None:
        self._server, self._tokenizer, self._name = server, tokenizer, name
        template = tokenizer.chat_template
        self._renders_calls = "tool_calls" in (template if isinstance(template, str) else json.dumps(template or ""))
        # what the tokenizer's method takes for itself, such as another template, is not the client's
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
        self._reserved = {item.name for item in parameters if item.kind is not item.VAR_KEYWORD} - {"documents"}
        self._numbers = count(1)

    def app(self) -> web.Application:
        app = application(self._name, self._health, max_model_len=self._server.max_len)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        return app

    def _health(self) -> str | None:
        failure = self._server.failure
        return None if failure is None else f"the generation thread failed: {failure}"

    async def _chat(self, request: web.Request) -> web.Response:
        body = await body_of(request, ChatRequest)
        check_model(body.model, self._name)
        tools = body.tools if body.tool_choice != "none" else None
        ids = await asyncio.to_thread(self._rendered, body, tools)
        number = next(self._numbers)
        limit = body.max_completion_tokens or body.max_tokens
        texts = await self._generate(body, ids, limit, whole=bool(tools) and self._renders_calls)
        choices = [self._chat_choice(body, text, index, number, bool(tools)) for index, text in enumerate(texts)]
        counts = usage(len(ids), sum(len(text.ids) for text in texts))
        answer = answer_to(ChatRequest, self._name, number, choices, counts)
        return web.json_response(answer | ({"prompt_token_ids": ids} if body.return_token_ids else {}))

    def _rendered(self, body: ChatRequest, tools: list[dict[str, Any]] | None) -> list[int]:
        """Return the token ids of a chat's prompt. Raises BadRequest."""
        options = body.chat_template_kwargs or {}
        if reserved := sorted(self._reserved & options.keys()):
            problem = f"chat_template_kwargs: {reserved[0]} is not an option of the model's chat template"
            raise BadRequest(problem, param="chat_template_kwargs")
        messages = messages_for_template(body.messages)
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # a template may raise anything, and what it renders is the client's
            problem = f"the chat template cannot render the messages: {type(error).__name__}: {error}"
            raise BadRequest(problem, param="messages") from None
        return self._encoded(prompt, "messages", add_special_tokens=False)

    def _encoded(self, text: str, field: str, **options: Any) -> list[int]:
        if len(text) > self._server.max_len * MOST_CHARACTERS:
            raise self._too_long(f"{len(text)} characters", field)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{field}: has half of a surrogate pair, which is not text", param=field) from None
        return list(self._tokenizer.encode(text, **options))

    def _too_long(self, length: str, field: str) -> BadRequest:
        problem = f"the prompt has {length}, and the maximum context length is {self._server.max_len} tokens"
        return BadRequest(problem, code="context_length_exceeded", param=field)

    def _chat_choice(self, body: ChatRequest, text: _Text, index: int, number: int, has_tools: bool) -> dict[str, Any]:
        content, calls = text.text, []
        if has_tools and self._renders_calls and text.finish_reason == "stop":
            content, calls = split_calls(text.text, f"call_{number}_{index}_")
        message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else text.finish_reason,
            "stop_reason": text.stop,
            "logprobs": None,
        }
        if body.logprobs:
            pieces = zip(self._pieces(text.ids), text.log_probs, strict=True)
            choice["logprobs"] = {
                "content": [
                    {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                    for piece, value in pieces
                ]
            }
        return choice | ({"token_ids": text.ids} if body.return_token_ids else {})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await body_of(request, CompletionRequest)
        check_model(body.model, self._name)
        prompts = [
            await asyncio.to_thread(self._encoded, prompt, "prompt") if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        limit = body.max_tokens or COMPLETION_TOKENS
        groups = await asyncio.gather(*(self._generate(body, ids, limit) for ids in prompts))
        pairs = [(ids, text) for ids, texts in zip(prompts, groups, strict=True) for text in texts]
        choices = []
        for index, (ids, text) in enumerate(pairs):
            choice: dict[str, Any] = {
                "index": index,
                "text": text.text,
                "finish_reason": text.finish_reason,
                "stop_reason": text.stop,
                "logprobs": None,
            }
            if body.logprobs is not None:
                pieces = self._pieces(text.ids)
                choice["logprobs"] = {"tokens": pieces, "token_logprobs": text.log_probs, "top_logprobs": None}
            if body.return_token_ids:
                choice |= {"token_ids": text.ids, "prompt_token_ids": ids}
            choices.append(choice)
        counts = usage(sum(map(len, prompts)), sum(len(text.ids) for _, text in pairs))
        answer = answer_to(CompletionRequest, self._name, next(self._numbers), choices, counts)
        return web.json_response(answer)

    async def _generate(
        self, body: ChatRequest | CompletionRequest, ids: list[int], max_tokens: int | None, *, whole: bool = False
    ) -> list[_Text]:
        """Return `n` generations. `whole`: with special tokens, as which some vocabularies have a tool call's tags."""
        if len(ids) >= self._server.max_len - 1:
            raise self._too_long(f"{len(ids)} tokens", "messages" if isinstance(body, ChatRequest) else "prompt")
        params = body.sampling() | {"stop": body.stops()} | ({"max_tokens": max_tokens} if max_tokens else {})

        async def one(number: int) -> _Text:
            seed = {} if body.seed is None else {"seed": body.seed + number}
            try:
                generation = await self._server.generate(ids, params | seed, "")
            except ValueError as error:
                raise BadRequest(str(error)) from None
            return self._text(body, generation, whole)

        return list(await asyncio.gather(*(one(number) for number in range(body.n or 1))))

    def _text(self, body: ChatRequest | CompletionRequest, generation: Any, whole: bool) -> _Text:
        ids, stops = generation.response_ids, body.stops()
        ended = bool(ids) and ids[-1] in self._server.stop_token_ids and not body.ignore_eos
        skip = (body.skip_special_tokens is not False) and not whole
        text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=skip)
        text, stop = cut(text, stops, keep=bool(body.include_stop_str_in_output))
        finish = "stop" if stop is not None or generation.stop_reason == "stop" else "length"
        return _Text(ids, generation.log_probs, text, finish, stop)

    def _pieces(self, ids: list[int]) -> list[str]:
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def open_server(
    model: str, *, name: str | None = None, max_len: int | None = None, max_requests: int = 64, trust: bool = False
) -> OpenAIServer:
    """Load a model and its tokenizer. Raises UserError."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
    except Exception as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(f"{model}: cannot be loaded as a model with a tokenizer ({reason[0]})") from error
    limit = int(getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LEN)
    if max_len is not None and max_len > limit:
        raise UserError(f"--max-len {max_len}: the model's context has {limit} tokens; pass at most that")
    max_len = max_len or min(limit, DEFAULT_MAX_LEN)
    try:
        server = LocalServer(
            model, max_requests=max_requests, max_len=max_len, load_format="auto", trust_remote_code=trust
        )
    except MemoryError as error:
        raise UserError(
            f"no memory for {max_requests} requests of {max_len} tokens; lower --max-requests or --max-len"
        ) from error
    server.tokenizer = tokenizer
    return OpenAIServer(server, tokenizer, name or model)
