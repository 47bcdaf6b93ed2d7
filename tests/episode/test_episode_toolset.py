"""An agent's tools: what the model is shown is what it calls, and each episode has its own memory of each."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.toolset import Toolset
from recipe.dag.tools.calculator import Calculator
from recipe.dag.tools.code_interpreter import CodeInterpreter
from recipe.dag.tools.sandbox_client import RunResult
from recipe.dag.types.record import ToolResult
from recipe.dag.types.tool import check_tool
from recipe.dag.workflow.agent_schema import Agent


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
    node = {"id": "solve", **({"hooks": "own.py"} if hook else {})}
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
    with pytest.raises(UserError, match=r"agent solver: unknown tool c\.py:S; available: a\.py:S, b\.py:S"):
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


class Strict:
    """Answers with `result`; its schema requires a number."""

    name = "strict"
    schema = {
        "type": "function",
        "function": {
            "name": "strict",
            "description": "",
            "parameters": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
        },
    }

    def __init__(self, result: Any = "text") -> None:
        self.result, self.calls = result, []

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> Any:
        self.calls.append(arguments)
        return self.result

    async def close(self) -> None: ...


def call_strict(tool: Strict, arguments: dict[str, Any], *, by_model: bool = True) -> ToolResult:
    tools = Toolset(agent({"path": "own.py:Strict"}), {"own.py:Strict": tool})
    return asyncio.run(tools.call("strict", arguments, {}, {}, lambda _: None, by_model=by_model))


@pytest.mark.parametrize("arguments", [{}, {"n": "one"}, {"m": 1}])
def test_a_call_that_does_not_fit_the_schema_is_answered_and_never_run(arguments):
    tool = Strict()
    result = call_strict(tool, arguments)
    assert result.status == "invalid" and "n" in result.text and tool.calls == []


def test_a_hooks_call_is_the_users_and_not_checked():
    assert call_strict(Strict(), {}, by_model=False).status == "success"


def test_text_is_a_successful_result():
    result = call_strict(Strict("found"), {"n": 1})
    assert result == ToolResult("strict", {"n": 1}, "success", "found", seconds=result.seconds) and result.seconds > 0


@pytest.mark.parametrize(
    ("result", "message"),
    [(ToolResult("strict", {}, "ok", ""), "returned the status 'ok'"), ({"text": ""}, "returned dict")],
)
def test_anything_else_than_text_or_a_result_is_a_fault(result, message):
    with pytest.raises(ToolFault, match=message):
        call_strict(Strict(result), {"n": 1})


def test_parameters_that_are_no_schema_are_reported_before_a_run():
    tool = Strict()
    tool.schema = {"type": "function", "function": {"name": "strict", "parameters": {"type": "objekt"}}}
    with pytest.raises(UserError, match="is not a JSON schema"):
        check_tool(tool, "own.py:Strict")


def test_a_reference_inside_the_schema_is_reported_before_a_run():
    tool = Strict()
    parameters = {"type": "object", "properties": {"n": {"$ref": "#/nowhere"}}}
    tool.schema = {"type": "function", "function": {"name": "strict", "parameters": parameters}}
    with pytest.raises(UserError, match="has a `\\$ref`"):
        check_tool(tool, "own.py:Strict")


@dataclass
class Adapter(Search):
    """Wraps an object of another library, in an attribute that the engine's own wrapper has, too."""

    tool: object = field(default_factory=object)


def test_a_tool_may_have_an_attribute_of_any_name():
    toolset = Toolset(agent("search"), {"search": Adapter()})
    kept: list[ToolResult] = []
    states: dict[str, Any] = {}
    asyncio.run(toolset.call("search", {}, states, {}, kept.append, by_model=True))
    assert [result.text for result in kept] == ["found it"]


def test_no_text_of_a_tool_has_lone_surrogates():
    @dataclass
    class Quoting(Search):
        async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> Any:
            return f"no page about {arguments['q']}"

    calculator, search = Calculator(), Quoting()
    tools = Toolset(agent("calculator", "search.py:Quoting"), {"calculator": calculator, "search.py:Quoting": search})

    async def call(name: str, arguments: dict[str, Any]) -> ToolResult:
        kept: list[ToolResult] = []
        result = await tools.call(name, arguments, {}, {}, kept.append, by_model=True)
        assert kept == [result]
        return result

    assert asyncio.run(call("calculator", {"expression": "2+\ud800"})).text.endswith("`?`")
    assert asyncio.run(call("search", {"q": "\udfff"})).text == "no page about ?"
