"""The tools of MCP servers in a workflow: listed when a run starts, limited together, each with a schema of its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.listed_tools import check_tools, describe_servers, with_listed_tools, with_stand_ins
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.tool_limits import LimitedTool
from recipe.dag.episode.toolset import Toolset
from recipe.dag.tools import web
from recipe.dag.workflow.agent_schema import DeclaredTool, ToolSpec
from tests.tools.mcp_server import TOOLS, McpServer


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(web, "MAX_WAIT_S", 0.0)


def notes(server: McpServer, **options: Any) -> DeclaredTool:
    kwargs = {"url": server.url, **options.pop("kwargs", {})}
    return DeclaredTool(**{"name": "mcp", "declared": "notes", "kwargs": kwargs, **options})


def flow(world, *tools: ToolSpec, **agent: Any):
    agents = [{"tools": tools, **agent}]
    return world.workflow([{"id": "solve"}], agents=agents)


def toolset(workflow, **options: Any) -> Toolset:
    return Toolset(workflow.agents[0], make_tools(workflow, None, **options))


def test_each_tool_of_a_server_takes_its_place(world):
    with McpServer() as server:
        workflow = asyncio.run(with_listed_tools(flow(world, notes(server), ToolSpec(name="calculator"))))
        tools = toolset(workflow)
    assert tools.names == ("shout", "store_text", "calculator")
    assert tools.schemas[0]["function"]["parameters"] == TOOLS[0]["inputSchema"]
    assert server.methods.count("tools/list") == 1 and describe_servers(workflow) == [
        f"{server.url} lists shout, store.text"
    ]
    # a hook calls a tool by the name that the model sees; that of the server is none of one tool
    assert tools.name_of("store_text") == "store_text" and tools.name_of("notes") is tools.name_of("mcp") is None
    assert json.loads(workflow.model_dump_json())["agents"]  # other processes get it


def test_a_listed_workflow_needs_no_server_again(world):
    with McpServer() as server:
        workflow = asyncio.run(with_listed_tools(flow(world, notes(server))))
    assert asyncio.run(with_listed_tools(workflow)) == workflow and toolset(workflow).names == ("shout", "store_text")


def test_agents_share_a_server_and_select_from_it(world):
    with McpServer() as server:
        one, other = notes(server), notes(server, kwargs={"tools": ["store.text"], "prefix": "n_"})
        workflow = world.workflow(
            [{"id": "a"}, {"id": "b", "agent": "agent1"}], agents=[{"tools": [one]}, {"tools": [other]}]
        )
        workflow = asyncio.run(with_listed_tools(workflow))
    made = make_tools(workflow, None)
    assert [Toolset(agent, made).names for agent in workflow.agents] == [("shout", "store_text"), ("n_store_text",)]


def test_the_limits_of_a_declaration_hold_for_all_tools_of_the_server(world):
    with McpServer() as server:
        workflow = asyncio.run(with_listed_tools(flow(world, notes(server, workers=2))))
    made = list(make_tools(workflow, None).values())
    assert all(isinstance(tool, LimitedTool) for tool in made) and made[0].limit is made[1].limit


def test_a_text_for_the_one_tool_that_was_selected_is_shown(world):
    spec = {"kwargs": {"tools": ["shout"]}, "description": "Be loud."}
    with McpServer() as server:
        workflow = asyncio.run(with_listed_tools(flow(world, notes(server, **spec))))
        hidden = notes(server, **spec | {"parameters": {"type": "object", "properties": {}}})
        with pytest.raises(UserError, match="hides the argument `text`"):
            make_tools(asyncio.run(with_listed_tools(flow(world, hidden))), None)
    assert toolset(workflow).schemas[0]["function"]["description"] == "Be loud."


def test_names_that_collide_are_refused(world):
    with McpServer(tools=[{**TOOLS[0], "name": "a.b"}, {**TOOLS[0], "name": "a/b"}]) as server:
        with pytest.raises(UserError, match="two tools of .* would be called 'a_b'"):
            asyncio.run(with_listed_tools(flow(world, notes(server))))
    with McpServer() as server, McpServer() as second:
        workflow = asyncio.run(with_listed_tools(flow(world, notes(server), notes(second))))
        with pytest.raises(UserError, match="two of its tools are called 'shout'"):
            toolset(workflow)


def test_without_the_server_tools_have_the_names_in_the_file(world):
    def names(**kwargs: Any) -> tuple[str, ...]:
        workflow = with_stand_ins(
            flow(world, ToolSpec(name="mcp", kwargs={"url": "${oc.env:NONE,http://h}", **kwargs}))
        )
        return toolset(workflow, online=False).names

    assert names(tools=["find", "get"]) == ("find", "get") and names() == ("mcp",)


def test_a_model_calls_a_servers_tool(world):
    def answer(prompt: str, sampling: dict, request: str) -> str:
        if "HELLO" in prompt:
            return "done"
        call = {"name": "shout", "arguments": {"text": "hello"} if "invalid arguments" in prompt else {"text": 3}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    async def main(workflow) -> Any:
        tools = make_tools(workflow, None)
        try:
            endpoint = PolicyEndpoint(world.Client(answer), world.Tokenizer(), 4096)
            return await EpisodeRunner(workflow, {"main": endpoint}, tools, seed=0).run(sample, "u", 0, step=0)
        finally:
            for tool in tools.values():
                await tool.close()

    sample = {"prompt": [{"role": "user", "content": "?"}], "ground_truth": "4"}
    with McpServer() as server:
        workflow = asyncio.run(with_listed_tools(flow(world, notes(server), tool_loop={})))
        episode = asyncio.run(main(workflow))
    results = episode.calls[0].tool_results
    assert [(result.name, result.status) for result in results] == [("shout", "invalid"), ("shout", "success")]
    assert results[1].text == "HELLO" and results[1].seconds > 0 and episode.calls[0].text == "done"


def test_the_servers_of_tools_are_asked_before_a_run(world, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\n\ntwo")
    workflow = flow(world, ToolSpec(name="search", kwargs={"folder": "texts"}), ToolSpec(name="calculator"))
    assert asyncio.run(check_tools(make_tools(workflow, None))) == ["texts: 1 passage"]
    lost = ToolSpec(name="search", workers=2, kwargs={"url": "http://127.0.0.1:9/x", "retries": 0})
    with pytest.raises(UserError, match="tool search: .*start the service"):
        asyncio.run(check_tools(make_tools(flow(world, lost), None)))
