"""A client of the Model Context Protocol over streamable HTTP.

Invariant: a request has one answer, whether the server sends it as JSON or as a stream of events. A session that the
server no longer knows is opened again, once per request. Nothing else of the protocol is offered to the server: of its
own requests only `ping` is answered, and its notifications are ignored.

Source: https://modelcontextprotocol.io/specification/2025-11-25, transports and lifecycle.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.core.http import MAX_BYTES, SHOWN, Answer, read_body
from recipe.dag.core.per_loop import PerLoop
from recipe.dag.tools.web import WebService

VERSION = "2025-11-25"
"""The version that is offered."""
VERSIONS = ("2025-03-26", "2025-06-18", VERSION)
"""Those that a server may choose; in what is used here they are alike."""
MAX_PAGES = 100
CLOSE_S = 5.0
_METHOD_NOT_FOUND = -32601
_FORGOTTEN = (400, 404)
"""404 by the protocol; many servers answer 400 to a session that they do not know."""
_STREAM = "text/event-stream"


class McpError(Exception):
    """The server answered a request with an error."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Session:
    headers: dict[str, str]

    @property
    def has_id(self) -> bool:
        return "Mcp-Session-Id" in self.headers


@dataclass(slots=True)
class _State:
    """The state of one event loop."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: _Session | None = None


class McpClient:
    """One session per event loop, opened by the first request."""

    def __init__(self, service: WebService):
        self.service = service
        self._numbers = itertools.count(1)
        self._states = PerLoop(_State)

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's tools as it describes them. Raises ToolFault, and UserError for a server that has none or
        does not follow the protocol."""
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            try:
                page = await self.request("tools/list", {"cursor": cursor} if cursor is not None else {})
            except McpError as error:
                raise self._wrong(f"tools/list: {error}") from None
            listed = page.get("tools")
            if not isinstance(listed, list) or not all(_is_tool(tool) for tool in listed):
                raise self._wrong("its list of tools has another form than the protocol's")
            tools += listed
            following = page.get("nextCursor")
            if following is None or following == cursor:
                return tools
            cursor = following
        raise self._wrong(f"its list of tools has more than {MAX_PAGES} pages")

    async def call_tool(self, name: str, arguments: dict[str, Any], *, repeatable: bool) -> dict[str, Any]:
        """Return the result of a call, `isError` included. Raises ToolFault, and McpError if the server refuses the
        call. `repeatable`: as in `WebService.send`."""
        return await self.request("tools/call", {"name": name, "arguments": arguments}, repeatable=repeatable)

    async def request(self, method: str, params: dict[str, Any], *, repeatable: bool = True) -> dict[str, Any]:
        """Return the result of a request. Raises McpError, ToolFault and UserError."""
        session = await self._session(None)
        answer = await self._post(method, params, session.headers, repeatable)
        if answer.status in _FORGOTTEN and session.has_id:
            session = await self._session(session)
            answer = await self._post(method, params, session.headers, repeatable)
        return self._result(answer)

    async def close(self) -> None:
        """End this event loop's session. The client can be used again."""
        state = self._states.pop()
        try:
            if state is not None and state.session is not None and state.session.has_id:
                async with asyncio.timeout(CLOSE_S):
                    await self.service.send("DELETE", headers=state.session.headers, once=True)
        except (ToolFault, UserError, TimeoutError):
            pass  # a server need not support it, and forgets the session some time later
        finally:
            await self.service.close()

    async def _session(self, lost: _Session | None) -> _Session:
        """Return the session, a new one if it is still the `lost` one."""
        state = self._states.get()
        async with state.lock:
            if state.session is None or state.session is lost:
                state.session = await self._open()
            return state.session

    async def _open(self) -> _Session:
        params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "verl-dag", "version": "1"}}
        answer = await self._post("initialize", params, {}, repeatable=True)
        try:
            result = self._result(answer)
        except McpError as error:
            raise self._wrong(f"initialize: {error}") from None
        version = result.get("protocolVersion")
        if version not in VERSIONS:
            raise self._wrong(f"it chose the protocol version {version!r}; known: {', '.join(VERSIONS)}")
        capabilities = result.get("capabilities")
        if not isinstance(capabilities, dict) or "tools" not in capabilities:
            raise self._wrong("it offers no tools")
        headers = {"MCP-Protocol-Version": str(version)}
        if session_id := answer.headers.get("Mcp-Session-Id"):
            headers["Mcp-Session-Id"] = session_id
        await self._tell({"jsonrpc": "2.0", "method": "notifications/initialized"}, headers)
        return _Session(headers)

    async def _post(self, method: str, params: dict[str, Any], headers: dict[str, str], repeatable: bool) -> Answer:
        number = next(self._numbers)

        async def read(answer: aiohttp.ClientResponse) -> bytes:
            if answer.content_type != _STREAM:
                return await read_body(answer)
            opened = answer.headers.get("Mcp-Session-Id")
            own = {**headers, "Mcp-Session-Id": opened} if opened else headers
            async for message in _messages(answer):
                if message.get("id") == number and "method" not in message:
                    return json.dumps(message).encode()
                if "id" in message and "method" in message:
                    await self._answer_request(message, own)
            raise aiohttp.ClientPayloadError("the stream ended before the answer")

        return await self.service.send(
            "POST",
            json={"jsonrpc": "2.0", "id": number, "method": method, "params": params},
            headers={"Accept": f"application/json, {_STREAM}", **headers},
            read=read,
            repeatable=repeatable,
        )

    async def _answer_request(self, message: dict[str, Any], headers: dict[str, str]) -> None:
        """Answer a request of the server, which may wait for it before it goes on."""
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            reply["result"] = {}
        else:
            reply["error"] = {"code": _METHOD_NOT_FOUND, "message": "this client offers only ping"}
        await self._tell(reply, headers)

    async def _tell(self, message: dict[str, Any], headers: dict[str, str]) -> None:
        await self.service.send("POST", json=message, headers={"Accept": f"application/json, {_STREAM}", **headers})

    def _result(self, answer: Answer) -> dict[str, Any]:
        """Return the result in an answer. Raises McpError for an error in the protocol's form, UserError for a server
        that does not speak it."""
        try:
            message = json.loads(answer.text)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, list) and len(message) == 1:
            message = message[0]
        error = message.get("error") if isinstance(message, dict) else None
        if isinstance(error, dict):
            code = error.get("code")
            text = " ".join(str(error.get("message") or error).split())
            raise McpError(code if isinstance(code, int) else 0, text[:SHOWN])
        if not answer.ok:
            raise self._wrong(f"HTTP {answer.status} {' '.join(answer.text.split())[:SHOWN]}".rstrip())
        result = message.get("result") if isinstance(message, dict) else None
        if not isinstance(result, dict):
            raise self._wrong(f"its answer is not one of JSON-RPC: {' '.join(answer.text.split())[:100]!r}")
        return result

    def _wrong(self, text: str) -> UserError:
        url = self.service.url
        return UserError(f"{self.service.where}: {url} is no MCP server for tools over streamable HTTP: {text}")


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return False
    return isinstance(tool.get("inputSchema"), dict) and isinstance(tool.get("description", ""), str | None)


async def _messages(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON-RPC messages of a stream of events."""
    async for data in _events(answer):
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            continue  # such as an event that only keeps the connection open
        for message in body if isinstance(body, list) else [body]:
            if isinstance(message, dict):
                yield message


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the data of each server-sent event."""
    decoder, rest, data, size = codecs.getincrementaldecoder("utf-8")("replace"), "", [], 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > MAX_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {MAX_BYTES >> 20} MiB")
        # a line may end in \r\n, \r or \n; a \r at the end of a chunk may be half of the first
        text = rest + decoder.decode(chunk)
        held = "\r" if text.endswith("\r") else ""
        *lines, rest = text[: len(text) - len(held)].replace("\r\n", "\n").replace("\r", "\n").split("\n")
        rest += held
        for line in lines:
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []
