"""Small servers with Anthropic's and Google's interfaces, which fail on request as `openai_server` does.

    with AnthropicServer(lambda body: [{"type": "text", "text": "4"}], faults={0: "529"}) as server:
        ... server.url ... server.requests ...

They are strict: a request that the real service refuses gets its 400.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tests.remote.openai_server import OpenAIServer


class AnthropicServer(OpenAIServer):
    """`answer(body)` returns a text, content blocks, or a whole message (a dict)."""

    empty = {"type": "message", "role": "assistant", "stop_reason": "end_turn"}
    words = {
        "long": "prompt is too long: 208310 tokens > 200000 maximum",
        "crowded": "input length and `max_tokens` exceed context limit: 12 + 48 > 16, decrease input length or "
        "`max_tokens` and try again",
        "quota": "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade "
        "or purchase credits.",
    }
    types = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        529: "overloaded_error",
    }

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models/{name}", self._model)
        router.add_post("/v1/messages", self._complete)

    def key_of(self, request: web.Request) -> str:
        return request.headers.get("x-api-key", "")

    async def _model(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        name = request.match_info["name"]
        if self._models is not None and name not in self._models:
            return self.error("404", f"model: {name}")
        return web.json_response({"type": "model", "id": name})

    def error(self, fault: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
        status = {"key": 401, "long": 400, "crowded": 400, "quota": 400}.get(fault) or int(fault)
        error = {"type": self.types.get(status, "api_error"), "message": message}
        body = {"type": "error", "error": error, "request_id": "req_1"}
        return web.json_response(body, status=status, headers=headers)

    def problem_of(self, body: dict[str, Any]) -> str | None:
        if "max_tokens" not in body:
            return "max_tokens: Field required"
        if unknown := body.keys() - {
            *("model", "messages", "max_tokens", "system", "temperature", "top_p", "top_k", "stop_sequences"),
            *("tools", "tool_choice", "thinking", "metadata"),
        }:
            return f"{sorted(unknown)[0]}: Extra inputs are not permitted"
        asked: set[str] = set()
        for message in body["messages"]:
            blocks = message["content"]
            if message["role"] not in ("user", "assistant"):
                return 'messages: Input should be "user" or "assistant"'
            if any(block["type"] == "text" and not block["text"] for block in blocks):
                return "messages: text content blocks must be non-empty"
            answered = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
            if asked - answered:
                return f"`tool_use` ids were found without `tool_result` blocks immediately after: {sorted(asked)}"
            if answered - asked:
                return f"unexpected `tool_use_id` found in `tool_result` blocks: {sorted(answered)}"
            asked = {block["id"] for block in blocks if block["type"] == "tool_use"}
            if body.get("thinking") and asked and blocks[0]["type"] != "thinking":
                return "Expected `thinking` or `redacted_thinking`, but found `tool_use`"
        return None

    def completion(self, body: dict[str, Any], answer: Any) -> dict[str, Any]:
        if isinstance(answer, dict):
            given = answer
        else:
            blocks = [{"type": "text", "text": answer}] if isinstance(answer, str) else answer
            calls = any(block["type"] == "tool_use" for block in blocks)
            given = {"content": blocks, "stop_reason": "tool_use" if calls else "end_turn"}
        usage = {"input_tokens": 5, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 3}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "usage": usage}
        return {**message, "stop_sequence": None, **given}


class GoogleServer(OpenAIServer):
    """`answer(body)` returns a text, parts, or a whole answer (a dict)."""

    base_path = "/v1beta"
    empty = {"usageMetadata": {}}
    words = {
        "long": "The input token count (2845475) exceeds the maximum number of tokens allowed (1048576).",
        "quota": "You exceeded your current quota, please check your plan and billing details.",
    }
    statuses = {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"}
    statuses |= {500: "INTERNAL", 503: "UNAVAILABLE"}

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1beta/models/{name}:countTokens", self._count)
        router.add_post("/v1beta/models/{name}:generateContent", self._complete)

    def key_of(self, request: web.Request) -> str:
        return request.headers.get("x-goog-api-key", "")

    async def _count(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        name = request.match_info["name"]
        if self._models is not None and name not in self._models:
            return self.error("404", f"models/{name} is not found for API version v1beta")
        return web.json_response({"totalTokens": 1})

    def error(self, fault: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
        status = {"key": 400, "long": 400, "quota": 429}.get(fault) or int(fault)
        details: list[dict[str, Any]] = []
        kind = "type.googleapis.com/google.rpc."
        if fault == "key":
            details = [{"@type": f"{kind}ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com"}]
        if fault in ("429", "quota"):
            per = "PerDay" if fault == "quota" else "PerMinute"
            violation = {"quotaId": f"GenerateRequests{per}PerProjectPerModel-FreeTier", "quotaValue": "20"}
            details = [{"@type": f"{kind}QuotaFailure", "violations": [violation]}]
            details += [{"@type": f"{kind}RetryInfo", "retryDelay": f"{self._retry_after}s"}]
        error = {"code": status, "message": message, "status": self.statuses.get(status, "UNKNOWN"), "details": details}
        return web.json_response({"error": error}, status=status)

    def problem_of(self, body: dict[str, Any]) -> str | None:
        if unknown := body.keys() - {"contents", "systemInstruction", "generationConfig", "tools", "safetySettings"}:
            return f'Invalid JSON payload received. Unknown name "{sorted(unknown)[0]}": Cannot find field.'
        calls = 0
        for content in body["contents"]:
            if content["role"] not in ("user", "model"):
                return "Please use a valid role: user, model."
            answers = sum("functionResponse" in part for part in content["parts"])
            if answers != calls:
                return "the number of function response parts should be equal to the number of function call parts"
            found = [part for part in content["parts"] if "functionCall" in part]
            if any("thoughtSignature" not in part for part in found[:1]):
                return "Function call is missing a thought_signature in functionCall parts."
            calls = len(found)
        return None

    def completion(self, body: dict[str, Any], answer: Any) -> dict[str, Any]:
        usage = {"promptTokenCount": 7, "candidatesTokenCount": 2, "thoughtsTokenCount": 1, "totalTokenCount": 10}
        if isinstance(answer, dict):
            return {"usageMetadata": usage, **answer}
        parts = [{"text": answer}] if isinstance(answer, str) else answer
        candidate = {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "test"}


class VertexServer(GoogleServer):
    base_path = "/v1/projects/p/locations/l"

    def add_routes(self, router: web.UrlDispatcher) -> None:
        models = f"{self.base_path}/publishers/google/models/{{name}}"
        router.add_post(f"{models}:countTokens", self._count)
        router.add_post(f"{models}:generateContent", self._complete)

    def key_of(self, request: web.Request) -> str:
        return request.headers.get("Authorization", "").removeprefix("Bearer ")

    def error(self, fault: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
        return super().error("401" if fault == "key" else fault, message, headers)
