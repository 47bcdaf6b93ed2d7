"""`verl-dag serve`: a model on the CPU behind OpenAI's interface.

Invariant: a choice depends on its prompt, its sampling parameters and its seed, never on the requests beside it (see
`generator`). Choice k of a request with a seed has the seed plus k. Every failure is an answer in OpenAI's error form.
Nothing is generated for a client that has closed its connection.

/v1/models, /v1/chat/completions, /v1/completions (a text or token ids, or several of them), /health. Tool calls in
hermes form (JSON inside <tool_call> tags) become `tool_calls` if the request has `tools` and the model's chat template
can render `tool_calls`, so that the client can send them back; otherwise they stay in the text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from aiohttp import web

from recipe.dag.errors import UserError
from recipe.dag.platform.generator import Request
from recipe.dag.platform.openai_wire import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    cut,
    messages_for_template,
    read,
    split_calls,
    usage,
)
from recipe.dag.platform.rollout_server import RolloutServer
from recipe.dag.types.record import Generation

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20
DEFAULT_MAX_LEN = 8192
"""Largest context by default: the cache of a longer one may not fit into memory."""
COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of /v1/completions."""


class LocalServer(RolloutServer):
    """The CPU rollout server, with outputs that need no verl."""

    @staticmethod
    def _output(request: Request, stop_reason: str, version: int) -> Any:
        return Generation(request.response_ids, request.log_probs, stop_reason, version)


@dataclass(frozen=True, slots=True)
class _Text:
    """One generation as text."""

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
        self._started, self._numbers = int(time.time()), count(1)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        if self._server.failure is not None:
            raise BadRequest(f"the generation thread failed: {self._server.failure}", status=503)
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._name, "object": "model", "created": self._started, "owned_by": "verl-dag"}
        return card | {"max_model_len": self._server.max_len}

    async def _chat(self, request: web.Request) -> web.Response:
        body = read(ChatRequest, await _json(request))
        self._check_model(body.model)
        tools = body.tools if body.tool_choice != "none" else None
        options = body.chat_template_kwargs or {}
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages_for_template(body.messages), tools=tools, tokenize=False, add_generation_prompt=True, **options
            )
        except BadRequest:
            raise
        except Exception as error:  # a template may raise anything, and what it renders is the client's
            problem = f"the chat template cannot render the messages: {type(error).__name__}: {error}"
            raise BadRequest(problem, param="messages") from None
        ids = list(self._tokenizer.encode(prompt, add_special_tokens=False))
        number = next(self._numbers)
        limit = body.max_completion_tokens or body.max_tokens
        texts = await self._generate(body, ids, limit, whole=bool(tools) and self._renders_calls)
        choices = [self._chat_choice(body, text, index, number, bool(tools)) for index, text in enumerate(texts)]
        return web.json_response(
            {
                "id": f"chatcmpl-{number}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._name,
                "choices": choices,
                "usage": usage(len(ids), sum(len(text.ids) for text in texts)),
                **({"prompt_token_ids": ids} if body.return_token_ids else {}),
            }
        )

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
        body = read(CompletionRequest, await _json(request))
        self._check_model(body.model)
        prompts = [
            list(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt for prompt in body.prompts()
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
        return web.json_response(
            {
                "id": f"cmpl-{next(self._numbers)}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": self._name,
                "choices": choices,
                "usage": usage(sum(map(len, prompts)), sum(len(text.ids) for _, text in pairs)),
            }
        )

    async def _generate(
        self, body: ChatRequest | CompletionRequest, ids: list[int], max_tokens: int | None, *, whole: bool = False
    ) -> list[_Text]:
        """Return `n` generations. `whole`: with special tokens, as which some vocabularies have a tool call's tags."""
        if len(ids) >= self._server.max_len - 1:
            problem = f"the prompt has {len(ids)} tokens, and the maximum context length is {self._server.max_len}"
            raise BadRequest(problem, code="context_length_exceeded", param="messages")
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

    def _check_model(self, name: str) -> None:
        if name != self._name:
            problem = f"there is no model {name!r}; this server has {self._name!r}"
            raise BadRequest(problem, status=404, code="model_not_found", param="model")


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413) from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    try:
        return await handler(request)
    except BadRequest as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPException as error:
        problem = BadRequest(f"{error.reason}: {request.method} {request.path}", status=error.status)
        return web.json_response(problem.body(), status=error.status)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        problem = BadRequest(f"{type(error).__name__}: {error}", status=500)
        return web.json_response(problem.body(), status=500)


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


def serve(server: OpenAIServer, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` gets the address once the server answers. Raises UserError."""
    asyncio.run(_serve(server, host, port, announce))


async def _serve(server: OpenAIServer, host: str, port: int, announce: Callable[[str], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # without handler_cancellation, a client that has gone would be generated for until its limit
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=2.0, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}; pass another --port") from None
        announce(f"http://{host}:{runner.addresses[0][1]}/v1")
        await stop.wait()
    finally:
        await runner.cleanup()
