"""`verl-dag serve --script`: a Python function behind OpenAI's chat interface, where a model would stand.

Invariant: no torch and no tokenizer; a token of this server is a word. A function that judges by rule can so take the
place of an external model, with the same requests, limits and faults on the way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web

from recipe.dag.core.tasks import invoke
from recipe.dag.platform.openai_http import answer_to, application, body_of, check_model
from recipe.dag.platform.openai_wire import BadRequest, ChatRequest, cut, messages_for_template, usage
from recipe.dag.types.convention import SCRIPT

Function = Callable[[list[dict[str, Any]]], Any]
"""messages -> the answer's text; sync (run in a thread) or async."""
_WORD = re.compile(r"\s*\S+")


class ScriptServer:
    """/v1/chat/completions, answered by a function. An exception of the function is HTTP 500."""

    def __init__(self, function: Function, name: str, max_requests: int = 64) -> None:
        """`max_requests`: calls of the function at once."""
        self.function, self._name, self._numbers = function, name, count(1)
        self._slots = asyncio.Semaphore(max_requests)

    def app(self) -> web.Application:
        app = application(self._name)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _chat(self, request: web.Request) -> web.Response:
        body = await body_of(request, ChatRequest)
        check_model(body.model, self._name)
        messages = messages_for_template(body.messages)
        texts = [await self._text(messages) for _ in range(body.n or 1)]
        return web.json_response(await asyncio.to_thread(self._answer, body, messages, texts))

    def _answer(self, body: ChatRequest, messages: list[dict[str, Any]], texts: list[str]) -> dict[str, Any]:
        choices = [self._choice(body, text, index) for index, text in enumerate(texts)]
        asked = sum(_words(message["content"]) for message in messages)
        answered = sum(_words(choice["message"]["content"]) for choice in choices)
        return answer_to(ChatRequest, self._name, next(self._numbers), choices, usage(asked, answered))

    async def _text(self, messages: list[dict[str, Any]]) -> str:
        async with self._slots:
            text = await invoke(self.function, [dict(message) for message in messages])
        if not isinstance(text, str):
            raise BadRequest(f"the script returned {type(text).__name__}, not a text", status=500)
        return text

    @staticmethod
    def _choice(body: ChatRequest, text: str, index: int) -> dict[str, Any]:
        text, stop = cut(text, body.stops(), keep=bool(body.include_stop_str_in_output))
        finish, limit = "stop", body.max_completion_tokens or body.max_tokens
        if limit is not None and _words(text) > limit:
            text, finish, stop = "".join(_WORD.findall(text)[:limit]), "length", None
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "finish_reason": finish, "stop_reason": stop, "logprobs": None}


def _words(text: str) -> int:
    return len(text.split())


def open_script(ref: str, *, name: str | None = None, max_requests: int = 64) -> ScriptServer:
    """Load `file.py:function`, with a path relative to the working folder. `name`: of the model in requests; by default
    the function's. Raises UserError."""
    function = SCRIPT.load(ref, Path.cwd(), "--script")
    return ScriptServer(function, name or ref.rpartition(":")[2], max_requests)
