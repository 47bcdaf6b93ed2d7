"""An agent's tools: what the model is shown is what it calls, and each episode has its own memory of each."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.record import ToolResult
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.toolset import Toolset
from recipe.dag.errors import UserError
from recipe.dag.tools.code_interpreter import CodeInterpreter
from recipe.dag.tools.sandbox_client import RunResult
from recipe.dag.workflow.schema import Agent


@dataclass
class Search:
    """Called `search` in its schema, whatever the workflow calls it."""

    name: str = "another"
    seen: list[tuple] = field(default_factory=list)
    schema = {"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any], *, site: str = "web") -> ToolResult:
        state["calls"] = state.get("calls", 0) + 1
        self.seen.append((arguments, dict(state), site))
        return ToolResult("search", arguments, "success", "found it")

    async def close(self) -> None: ...


class Sandbox:
    """Remembers the time that each program is given."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def run_code(self, code: str, *, timeout_s: float, memory_mb: int) -> RunResult:
        self.seconds.append(timeout_s)
        return RunResult("success", "1\n", "", 0, 0.1, 1)


def agent(*tools: Any) -> Agent:
    return Agent(name="solver", policy="main", tools=tools)


def run_episode(world, declared: Any, tool: Any, *texts: str, hook: str = "", sample: dict | None = None, loop=None):
    client = world.Client(lambda *_: texts[min(len(client.requests), len(texts)) - 1])
    node = {"node_id": "solve", "agent_options": {"process_path": "own.py"} if hook else {}}
    flow = world.workflow([node], agents=[{"tools": [declared], "tool_loop": loop}], files={"own.py": hook})
    tools = {spec.key: tool for spec in flow.agents[0].tools}

    runner = EpisodeRunner(flow, {"main": PolicyEndpoint(client, world.Tokenizer(), 4096)}, tools, seed=0)
    episode = asyncio.run(runner.run(world.sample(**(sample or {})), "u0", 0, step=0))
    assert episode.fault is None, episode.fault
    return episode


def test_a_tool_given_by_path_is_called_as_its_schema_says(world):
    call = "<tool_call>" + json.dumps({"name": "search", "arguments": {"q": "x"}}) + "</tool_call>"
    tool = Search()
    episode = run_episode(world, "own_tool.py:Search", tool, call, "done", loop={"format": "hermes"})
    assert "['search']" in episode.calls[0].prompt_text
    assert [(r.name, r.status, r.text) for r in episode.calls[0].tool_results] == [("search", "success", "found it")]
    assert tool.seen == [({"q": "x"}, {"calls": 1}, "web")]


@pytest.mark.parametrize("name", ["search", "own_tool.py:Search"])
def test_a_hook_calls_a_tool_by_its_name_or_as_it_is_declared(world, name):
    hook = f"""
async def post_process(tokenizer, prompt_ids, response_ids, *, context):
    return (await context.call_tool({name!r}, q="y")).text
"""
    tool = Search()
    assert run_episode(world, "own_tool.py:Search", tool, "hm", hook=hook).calls[0].text == "found it"
    assert len(tool.seen) == 1


def test_a_samples_tools_kwargs_reach_the_tool(world):
    call = "<tool_call>" + json.dumps({"name": "search", "arguments": {}}) + "</tool_call>"
    kwargs = {"search": {"create_kwargs": {"index": "maths"}, "execute_kwargs": {"site": "wiki"}}}
    tool = Search()
    run_episode(world, "t.py:S", tool, call, call, "done", sample={"tools_kwargs": kwargs}, loop={})
    assert [(state, site) for _, state, site in tool.seen] == [
        ({"index": "maths", "calls": 1}, "wiki"),
        ({"index": "maths", "calls": 2}, "wiki"),
    ]
    assert kwargs["search"]["create_kwargs"] == {"index": "maths"}


def test_two_tools_of_one_name_are_refused():
    tools = {"a.py:S": Search(), "b.py:S": Search()}
    with pytest.raises(UserError, match="two of its tools are called 'search'"):
        Toolset(agent("a.py:S", "b.py:S"), tools)
    with pytest.raises(UserError, match=r"agent solver: there is no tool c\.py:S; there is a\.py:S, b\.py:S"):
        Toolset(agent("c.py:S"), tools)


def test_agents_whose_tools_have_other_kwargs_have_tools_of_their_own():
    first, second = agent({"path": "a.py:S", "kwargs": {"k": 1}}), agent({"path": "a.py:S", "kwargs": {"k": 2}})
    assert len({spec.key for each in (first, second, first) for spec in each.tools}) == 2


def test_a_hook_gets_the_time_that_it_asks_for_and_the_model_no_more_than_it_may(world):
    sandbox = Sandbox()
    hook = """
async def post_process(tokenizer, prompt_ids, response_ids, *, context, code_timeout=120):
    await context.call_tool("code_interpreter", code="1", timeout=code_timeout)
"""
    run_episode(world, "code_interpreter", CodeInterpreter(sandbox), "hm", hook=hook)
    assert sandbox.seconds == [120.0]
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": "1", "timeout": 120}})
    for tool in (CodeInterpreter(sandbox), CodeInterpreter(sandbox, max_timeout_s=90.0)):
        run_episode(world, "code_interpreter", tool, f"<tool_call>{call}</tool_call>", "done", loop={})
    assert sandbox.seconds == [120.0, 60.0, 90.0]
