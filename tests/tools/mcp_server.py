"""An MCP server that follows the specification as strictly as a client may need, and fails on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.tools.web_server import Request, WebServer

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = (
    {"name": "shout", "description": "Make it loud.", "inputSchema": TEXT, "annotations": {"readOnlyHint": True}},
    {"name": "store.text", "title": "Store", "inputSchema": TEXT},
)


def content(text: str, **others: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], **others}


def shouted(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return content(arguments["text"].upper())


class McpServer(WebServer):
    """`call(name, arguments)` returns the result of a call, or raises `Refusal`; by default the text in capitals.

    form: json, or sse: each answer is a stream in which a comment, a notification and a ping come first. fault: returns
    a WebServer's answer for a request in place of its own, or None. sessions: whether it has any. page: tools per page.
    """

    def __init__(
        self,
        call: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda name, arguments: content(
            arguments["text"].upper()
        ),
        *,
        tools: Any = TOOLS,
        form: str = "json",
        fault: Callable[[Request], Any] = lambda request: None,
        sessions: bool = True,
        page: int = 100,
        version: str | None = None,
        capabilities: Any = None,
        key: str | None = None,
    ) -> None:
        super().__init__(self._reply)
        self.call, self.tools, self.form, self.fault = call or shouted, tools, form, fault
        self.live: set[str] = set()
        self.opened = 0
        self.pongs = 0
        self._sessions, self._page, self._version, self._key = sessions, page, version, key
        self._capabilities = {"tools": {}} if capabilities is None else capabilities

    @property
    def methods(self) -> list[str]:
        """Return what was asked, in order."""
        bodies = [(request.method, request.body) for request in self.requests]
        return [method if body is None else body.get("method", "answer") for method, body in bodies]

    def forget(self) -> None:
        """Lose all sessions, as a server that restarts does."""
        self.live.clear()

    def _reply(self, request: Request) -> Any:
        if (fault := self.fault(request)) is not None:
            return fault
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            return (401, f"no access with {request.headers.get('Authorization')}")
        session = request.headers.get("Mcp-Session-Id")
        if request.method == "DELETE":
            self.live.discard(session or "")
            return (200, "")
        assert request.method == "POST" and request.headers["Accept"] == "application/json, text/event-stream"
        message = request.body
        assert message["jsonrpc"] == "2.0"
        method = message.get("method")
        if method == "initialize":
            return self._initialize(message)
        if self._sessions and session not in self.live:
            return (404, "")
        if method is None:
            self.pongs += message == {"jsonrpc": "2.0", "id": "ping-1", "result": {}}
            return (202, "")
        assert request.headers["MCP-Protocol-Version"] == (self._version or "2025-11-25")
        if "id" not in message:
            return (202, "")
        return self._message(message["id"], self._result(method, message["params"]))

    def _initialize(self, message: dict[str, Any]) -> Any:
        assert message["params"]["clientInfo"]["name"] == "verl-dag" and message["params"]["capabilities"] == {}
        self.opened += 1
        headers = {}
        if self._sessions:
            headers = {"Mcp-Session-Id": f"session-{self.opened}"}
            self.live.add(headers["Mcp-Session-Id"])
        version = self._version or message["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": self._capabilities, "serverInfo": {"name": "test"}}
        return self._message(message["id"], {"result": result}, headers)

    def _result(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "tools/list":
            start = int(params.get("cursor", 0))
            page = {"tools": list(self.tools[start : start + self._page])}
            if start + self._page < len(self.tools):
                page["nextCursor"] = str(start + self._page)
            return {"result": page}
        assert method == "tools/call"
        try:
            return {"result": self.call(params["name"], params["arguments"])}
        except Refusal as refusal:
            return {"error": {"code": refusal.code, "message": str(refusal)}}

    def _message(self, number: Any, content: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        message = {"jsonrpc": "2.0", "id": number, **content}
        if self.form == "json":
            return web.json_response(message, headers=headers)

        async def stream(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **(headers or {})})
            await response.prepare(request)
            progress = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
            ping = {"jsonrpc": "2.0", "id": "ping-1", "method": "ping"}
            await response.write(b": hello\r\n\r\nid: 1\r\ndata:\r\n\r\n")
            await response.write(f"event: message\ndata: {json.dumps(progress)}\n\n".encode())
            await response.write(f"data: {json.dumps(ping)}\n\n".encode())
            # the answer in lines and chunks of its own
            text = json.dumps(message, indent=1, ensure_ascii=False)
            data = ("".join(f"data: {line}\r\n" for line in text.split("\n")) + "\r\n").encode()
            for start in range(0, len(data), 7):
                await response.write(data[start : start + 7])
                await asyncio.sleep(0)
            return response

        return stream


class Refusal(Exception):
    """An error of the protocol in place of a result."""

    def __init__(self, message: str, code: int = -32602):
        super().__init__(message)
        self.code = code
