"""MCP servers: the protocol, sessions that end, failures and whose they are, and what a model is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp.web import Response

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.tools import mcp_client
from recipe.dag.tools.base import Resources
from recipe.dag.tools.mcp import Mcp, list_server, shown_name, stand_ins, text_of, without_references
from recipe.dag.types.record import ToolResult
from tests.tools.mcp_server import TOOLS, McpServer, Refusal, content

SHOUT, STORE = TOOLS


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def listed(server: McpServer, **options: Any) -> list[dict[str, Any]]:
    return asyncio.run(list_server(Mcp.Options(url=server.url, **options)))


def using(server: McpServer, work: Callable[[Mcp], Awaitable[Any]], tool: dict = SHOUT, **options: Any) -> Any:
    async def main() -> Any:
        made = Mcp.make(Mcp.Options(url=server.url, listed=tool, **options), Resources("w.yaml"))
        try:
            return await work(made)
        finally:
            await made.close()

    return asyncio.run(main())


def call(server: McpServer, text: str = "hé", tool: dict = SHOUT, **options: Any) -> ToolResult:
    return using(server, lambda made: made.execute({"text": text}, {}), tool, **options)


@pytest.mark.parametrize("form", ["json", "sse"])
@pytest.mark.parametrize("sessions", [True, False])
def test_a_call_opens_a_session_and_ends_it(form, sessions):
    with McpServer(form=form, sessions=sessions) as server:
        result = call(server)
    assert (result.name, result.status, result.text) == ("shout", "success", "HÉ")
    assert server.opened == 1 and not server.live
    expected = ["initialize", "notifications/initialized", "tools/call", *(["DELETE"] if sessions else [])]
    assert [method for method in server.methods if method != "answer"] == expected
    # within each stream, the server asks whether the client is there
    assert server.pongs == (2 if form == "sse" else 0)


def test_tools_are_listed_page_by_page():
    tools = [{**SHOUT, "name": f"t{k}"} for k in range(7)]
    with McpServer(tools=tools, page=3, form="sse") as server:
        assert [tool["name"] for tool in listed(server)] == [f"t{k}" for k in range(7)]
        assert [tool["name"] for tool in listed(server, tools=["t5", "t1"])] == ["t5", "t1"]
        with pytest.raises(UserError, match="no tool `t9`; available: `t0`, `t1`"):
            listed(server, tools=["t9"])


def test_calls_at_once_share_one_session():
    async def work(tool: Mcp) -> list[ToolResult]:
        return await asyncio.gather(*(tool.execute({"text": f"w{k}"}, {}) for k in range(20)))

    with McpServer(form="sse") as server:
        results = using(server, work)
    assert [result.text for result in results] == [f"W{k}" for k in range(20)] and server.opened == 1


def test_the_tools_of_one_server_share_its_session():
    async def main(url: str) -> None:
        resources = Resources("w.yaml")
        tools = [Mcp.make(Mcp.Options(url=url, listed=tool), resources) for tool in TOOLS]
        for tool in tools:
            assert (await tool.execute({"text": "x"}, {})).ok
        for tool in tools:
            await tool.close()

    with McpServer() as server:
        asyncio.run(main(server.url))
    assert server.opened == 1 and server.methods.count("DELETE") == 1


@pytest.mark.parametrize("status", [404, 400])
def test_a_session_that_the_server_forgot_is_opened_again_once(status):
    def forgetful(request) -> Any:
        lost = request.headers.get("Mcp-Session-Id") not in server.live
        return (status, "") if lost and request.body and request.body["method"] == "tools/call" else None

    async def work(tool: Mcp) -> list[ToolResult]:
        first = await tool.execute({"text": "a"}, {})
        server.forget()
        return [first, *await asyncio.gather(*(tool.execute({"text": f"b{k}"}, {}) for k in range(9)))]

    with McpServer(fault=forgetful) as server:
        results = using(server, work)
    assert [result.text for result in results] == ["A", *(f"B{k}" for k in range(9))] and server.opened == 2


def test_a_server_that_restarts_meanwhile_is_found_again():
    async def work(tool: Mcp) -> list[ToolResult]:
        first = await tool.execute({"text": "a"}, {})
        await asyncio.to_thread(server.kill)
        server.forget()
        with pytest.raises(ToolFault) as lost:
            await tool.execute({"text": "b"}, {})
        assert lost.value.infra
        await asyncio.to_thread(server.start)
        return [first, await tool.execute({"text": "c"}, {})]

    with McpServer() as server:
        assert [result.text for result in using(server, work, retries=0)] == ["A", "C"]


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (content("no such file", isError=True), "failed", "no such file"),
        ({"content": [], "structuredContent": {"a": "ü"}}, "success", '{"a": "ü"}'),
        ({"content": []}, "success", "(no output)"),
        ({}, "success", "(no output)"),
    ],
)
def test_what_a_tool_says_is_a_result(answer, status, text):
    with McpServer(lambda name, arguments: answer) as server:
        result = call(server)
    assert (result.status, result.text) == (status, text)


@pytest.mark.parametrize("code", [-32602, -32603, 7])
def test_an_error_of_the_protocol_is_a_result_that_the_model_reads(code):
    def refuse(name: str, arguments: dict) -> dict:
        raise Refusal("Unknown tool:\n shout", code)

    with McpServer(refuse, form="sse") as server:
        result = call(server)
    assert (result.status, result.text) == ("failed", "Error: Unknown tool: shout")


def of_calls(*answers: Any) -> Callable[[Any], Any]:
    left = list(answers)

    def fault(request: Any) -> Any:
        return left.pop(0) if left and request.body and request.body.get("method") == "tools/call" else None

    return fault


@pytest.mark.parametrize("fault", ["drop", (500, ""), (502, "")])
def test_only_calls_that_a_server_may_repeat_are_repeated(fault):
    with McpServer(fault=of_calls(fault, fault)) as server:
        assert call(server).text == "HÉ"
    assert server.methods.count("tools/call") == 3
    with McpServer(fault=of_calls(fault)) as server, pytest.raises(ToolFault) as error:
        call(server, tool=STORE)
    assert error.value.infra and server.methods.count("tools/call") == 1
    idempotent = {**STORE, "annotations": {"idempotentHint": True}}
    with McpServer(fault=of_calls(fault)) as server:
        assert call(server, tool=idempotent).ok


def test_an_overloaded_server_is_asked_again_whatever_the_tool():
    with McpServer(fault=of_calls((503, ""), (429, ""))) as server:
        assert call(server, tool=STORE).ok


def test_a_stream_that_breaks_off_is_a_fault():
    def cut(request: Any) -> Any:
        called = request.body and request.body.get("method") == "tools/call"
        return Response(text="data: {}\n\n", content_type="text/event-stream") if called else None

    with McpServer(fault=cut) as server, pytest.raises(ToolFault, match="the stream ended before the answer") as error:
        call(server, retries=1)
    assert error.value.infra and server.methods.count("tools/call") == 2


def test_a_call_that_takes_too_long_is_a_fault():
    with McpServer(fault=of_calls("hang")) as server, pytest.raises(ToolFault, match="no answer within 0.3 s"):
        call(server, retries=0, request_timeout_s=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fault": lambda request: (404, "not here")},
            "no MCP server for tools over streamable HTTP: HTTP 404 not here",
        ),
        ({"fault": lambda request: (405, "")}, "streamable HTTP: HTTP 405"),
        ({"fault": lambda request: (200, "<html>")}, "its answer is not one of JSON-RPC: '<html>'"),
        ({"fault": lambda request: {"jsonrpc": "2.0", "id": 1, "error": {"code": -1, "message": "Old."}}}, "Old."),
        ({"version": "2026-07-28"}, "it chose the protocol version '2026-07-28'; known: 2025-03-26"),
        ({"capabilities": {"prompts": {}}}, "it offers no tools"),
        ({"capabilities": 5}, "it offers no tools"),
        ({"tools": ()}, "lists no tools"),
        ({"tools": [{"name": "deep", "inputSchema": nested(900)}]}, "tool deep: its schema is nested more than 100"),
        ({"tools": [{"name": "x"}]}, "another form"),
        ({"tools": [{"name": 3, "inputSchema": {}}]}, "another form"),
        ({"fault": lambda request: (503, "down")}, "HTTP 503: down.*start the server, or correct `url`"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(options, message):
    with McpServer(**options) as server, pytest.raises(UserError, match=message) as error:
        listed(server, retries=0)
    assert "\n" not in str(error.value)


def test_a_list_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(mcp_client, "MAX_PAGES", 5)
    with McpServer(tools=[SHOUT] * 9, page=1) as server, pytest.raises(UserError, match="more than 5 pages"):
        listed(server)


@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18"])
def test_a_server_may_choose_an_earlier_version(version):
    with McpServer(version=version) as server:
        assert call(server).ok


def test_the_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("MCP_KEY", "s3cr3t")
    with McpServer(lambda name, arguments: content("your key is s3cr3t"), key="s3cr3t", form="sse") as server:
        assert call(server, key_env="MCP_KEY").text == "your key is ***"
        monkeypatch.setenv("MCP_KEY", "wr0ng-key")
        with pytest.raises(UserError, match=r"refuses the key \(HTTP 401: no access with Bearer \*\*\*") as error:
            listed(server, key_env="MCP_KEY")
    assert "wr0ng" not in str(error.value)


def test_what_is_no_text_is_named():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "data": "...", "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///b", "text": "b"}},
        {"type": "resource", "resource": {"uri": "file:///c", "blob": "..."}},
        {"type": "resource_link", "uri": "file:///d"},
        "nonsense",
    ]
    expected = ["a", "[image image/png, not shown]", "b", "[resource file:///c, not shown]"]
    assert text_of({"content": parts}) == "\n".join([*expected, "[resource_link file:///d, not shown]"])


def test_a_model_is_shown_what_the_server_lists():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Point", "description": "Where."}, "definitions": {"type": "string"}},
        "$defs": {
            "Point": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Real"}}},
            "Real": {"type": "number"},
        },
    }
    tool = Mcp(Mcp.Options(url="http://h", prefix="my_"), {"name": "draw/line", "inputSchema": schema}, None)
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "description": "Where."}
    parameters = {"type": "object", "properties": {"at": point, "definitions": {"type": "string"}}}
    function = {"name": "my_draw_line", "description": "my_draw_line", "parameters": parameters}
    assert tool.schema == {"type": "function", "function": function}
    assert Mcp.shown_as({"prefix": "my_", "listed": {"name": "draw/line"}}) == tool.name
    assert shown_name("x" * 99, "a") == "a" + "x" * 63
    store = Mcp(Mcp.Options(url="http://h"), STORE, None)
    assert (store.name, store.schema["function"]["description"]) == ("store_text", "Store")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"items": {"$ref": "#/$defs/A"}}}}, "to itself"),
        (nested(900), "tool x: its schema is nested more than 100"),
        ({"properties": {"a": {"$ref": "#/$defs/B"}}}, "refers to #/[$]defs/B, which it does not define"),
        ({"properties": {"a": {"$ref": "http://other/schema"}}}, "does not define"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/0"}},
                "$defs": {str(k): {"allOf": [{"$ref": f"#/$defs/{k + 1}"}] * 2} for k in range(40)} | {"40": {}},
            },
            "to itself",
        ),
    ],
)
def test_a_schema_that_no_model_can_be_shown_is_refused(schema, message):
    with pytest.raises(UserError, match=message):
        without_references(schema, "tool x")


def test_options_are_checked():
    def problems(**options: Any) -> list[str]:
        return [f"{key}: {text}" for key, text in Mcp.problems(Mcp.Options(**options), "w.yaml")]

    assert problems(url="http://host/mcp") == [] == problems(url="${oc.env:URL}/mcp")
    assert "URL such as" in problems(url="host")[0]
    assert "not the key itself" in problems(url="http://host", key_env="sk-123")[0]
    assert "is set when a run starts" in problems(url="http://host", listed=SHOUT)[0]
    with pytest.raises(UserError, match="have not been listed"):
        Mcp.make(Mcp.Options(url="http://host"), Resources("w.yaml"))


def test_no_server_is_asked_where_no_episode_counts():
    (tool,) = stand_ins(Mcp.Options(url="http://127.0.0.1:9/x", tools=["find"]))
    made = Mcp.make(Mcp.Options(url="http://127.0.0.1:9/x", listed=tool), Resources("w", online=False))
    assert asyncio.run(made.execute({"q": 1}, {})).status == "success" and made.name == "find"
