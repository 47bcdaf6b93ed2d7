"""What a workflow sets on a tool holds for all episodes. Time is virtual: a loop that waits skips ahead."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.tool_limits import Limit, LimitedTool, most_processes, share_limits
from recipe.dag.episode.toolset import Toolset
from recipe.dag.tools.sandbox_client import RunResult
from recipe.dag.types.record import ToolResult
from recipe.dag.workflow.agent_schema import Agent, DeclaredTool, ToolSpec

TOOL = """
import asyncio


class Search:
    name = "search"

    def __init__(self, index="all"):
        self.index, self.running, self.most, self.starts = index, 0, 0, []
        self.schema = {"type": "function", "function": {"name": "search", "description": "Own.", "parameters": {
            "type": "object", "properties": {"query": {"type": "string"}, "top": {}}, "required": ["query"]}}}

    async def execute(self, arguments, state):
        self.starts.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(float(arguments.get("seconds", 1)))
        finally:
            self.running -= 1
        return arguments["query"] * 50

    async def close(self):
        self.closed = True
"""


class _SkipAhead(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is left to wait for"
            self.now += timeout
        return ready


class VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _SkipAhead()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run(work: Coroutine) -> Any:
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(work)


def workflow(world, *tools: dict | ToolSpec):
    agents = [{"tools": [tool], "policy": "main"} for tool in tools]
    nodes = [{"id": f"n{k}", "agent": f"agent{k}"} for k in range(len(tools))]
    return world.workflow(nodes, agents=agents, files={"tool.py": TOOL})


async def call(tool: Any, **arguments: Any) -> ToolResult:
    spec = ToolSpec(name=tool.name)
    toolset = Toolset(Agent(name="a", policy="main", tools=(spec,)), {spec.key: tool})
    (name,) = toolset.names
    return await toolset.call(name, {"query": "q", **arguments}, {}, {}, lambda result: None, by_model=True)


def only(tools: dict) -> Any:
    (tool,) = tools.values()
    return tool


def test_no_more_calls_run_at_once_than_there_are_workers(world):
    tool = only(make_tools(workflow(world, {"path": "tool.py:Search", "workers": 3}), None))

    async def main() -> None:
        await asyncio.gather(*(call(tool) for _ in range(10)))

    run(main())
    assert tool.most == 3 and tool.starts == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_calls_start_at_the_rate_that_is_set(world):
    tool = only(make_tools(workflow(world, {"path": "tool.py:Search", "calls_per_second": 4}), None))

    async def main() -> None:
        await asyncio.gather(*(call(tool) for _ in range(5)))
        await asyncio.sleep(10)
        await call(tool)

    run(main())
    assert tool.starts == [0, 0.25, 0.5, 0.75, 1.0, 12.0]  # what was not used before is not saved up


def test_the_limits_of_a_declared_tool_hold_for_agents_that_override_other_parts(world):
    declared = {"path": "tool.py:Search", "workers": 1, "declared": "search"}
    specs = [
        DeclaredTool(**declared),
        DeclaredTool(**declared, kwargs={"index": "x"}),
        DeclaredTool(**declared | {"workers": 2}),
    ]
    first, second, third = make_tools(workflow(world, *specs), None).values()

    async def main() -> None:
        await asyncio.gather(*(call(tool) for tool in (first, second, third, third)))

    run(main())
    assert (first.starts, second.starts, third.starts) == ([0], [1], [0, 0])


def test_two_tools_that_are_declared_apart_have_limits_of_their_own(world):
    specs = [DeclaredTool(path="tool.py:Search", workers=1, declared=name) for name in ("left", "right")]
    left, right = make_tools(workflow(world, *specs), None).values()

    async def main() -> None:
        await asyncio.gather(call(left), call(right))

    run(main())
    assert left.starts == right.starts == [0]


def test_a_call_that_takes_too_long_is_shown_to_the_model_and_cancelled(world):
    tool = only(make_tools(workflow(world, {"path": "tool.py:Search", "timeout_s": 2, "workers": 1}), None))

    async def main() -> list[ToolResult]:
        return await asyncio.gather(call(tool, seconds=3), call(tool, seconds=1.5))

    slow, quick = run(main())
    assert (slow.status, slow.text) == ("timeout", "[timeout] no result within 2 s")
    assert quick.status == "success"  # the time that it waited does not count
    assert tool.running == 0 and tool.starts == [0, 2]


def test_a_cancelled_call_frees_its_worker(world):
    tool = only(make_tools(workflow(world, {"path": "tool.py:Search", "workers": 1, "calls_per_second": 1}), None))

    async def main() -> ToolResult:
        tasks = [asyncio.ensure_future(call(tool, seconds=100)) for _ in range(3)]
        await asyncio.sleep(5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await call(tool)

    assert run(main()).status == "success" and tool.most == 1


def test_a_time_out_of_the_tools_own_is_not_the_models(world):
    class Broken:
        name, schema = "search", {"type": "function", "function": {"name": "search"}}

        async def execute(self, arguments: dict, state: dict) -> str:
            raise TimeoutError("upstream")

        async def close(self) -> None: ...

    limited = LimitedTool(Broken(), Limit(), ToolSpec(path="x.py:Broken", timeout_s=5))
    with pytest.raises(ToolFault, match="upstream") as caught:
        run(call(limited))
    assert caught.value.infra


def test_a_long_result_is_cut(world):
    tool = only(make_tools(workflow(world, {"path": "tool.py:Search", "max_output_chars": 40}), None))
    assert len(run(call(tool)).text) == 40


def test_the_model_is_shown_what_the_workflow_says_and_held_to_it(world):
    parameters = {"type": "object", "properties": {"query": {"enum": ["q"]}}, "required": ["query"]}
    spec = {"path": "tool.py:Search", "description": "Find a word.", "parameters": parameters}
    tool = only(make_tools(workflow(world, spec), None))
    function = tool.schema["function"]
    assert (function["name"], function["description"], function["parameters"]) == ("search", "Find a word.", parameters)
    assert tool.tool.schema["function"]["description"] == "Own."
    assert run(call(tool)).status == "success"
    assert run(call(tool, query="other")).status == "invalid" and len(tool.starts) == 1


@pytest.mark.parametrize(
    ("properties", "message"),
    [({"question": {}}, "shows the argument `question`"), ({"top": {}}, "hides the argument `query`")],
)
def test_parameters_that_the_class_does_not_take_are_refused(world, properties, message):
    spec = {"path": "tool.py:Search", "parameters": {"type": "object", "properties": properties}}
    with pytest.raises(UserError, match=message):
        make_tools(workflow(world, spec), None)


def test_a_tool_without_limits_is_not_wrapped(world):
    flow = workflow(world, {"path": "tool.py:Search", "kwargs": {"index": "x"}})
    assert type(only(make_tools(flow, None))).__name__ == "Search"


def test_the_code_interpreter_grants_the_model_what_the_user_allows(world):
    seconds: list[tuple[float, int]] = []

    class Sandbox:
        async def run_code(self, code: str, *, timeout_s: float, memory_mb: int) -> RunResult:
            seconds.append((timeout_s, memory_mb))
            return RunResult("success", code[-30:], "", 0, 0.1, 1)

    spec = {"name": "code_interpreter", "max_timeout_s": 300, "memory_mb": 64, "auto_print": True, "workers": 2}
    tool = only(make_tools(workflow(world, spec), Sandbox(), timeout_s=20, memory_mb=1024))
    results = [run(call(tool, code="1", **extra)) for extra in ({"timeout": 120}, {"timeout": 301}, {})]
    assert seconds == [(120, 64), (300, 64), (20, 64)]
    assert "print(_value)" in results[0].text and "300 at most" in str(tool.schema)


def test_processes_divide_the_limits_among_them():
    whole = Limit(7, 3.0)
    parts = [whole.share(index, 3) for index in range(3)]
    assert [part.workers for part in parts] == [3, 2, 2]
    assert sum(part.calls_per_second or 0 for part in parts) == pytest.approx(3.0)
    assert Limit().share(1, 4).workers is None


def test_tools_that_share_a_limit_share_it_in_each_process_too(world):
    declared = {"path": "tool.py:Search", "workers": 5, "declared": "search"}
    tools = make_tools(workflow(world, DeclaredTool(**declared), DeclaredTool(**declared, timeout_s=1)), None)
    share_limits(tools, 0, 2)
    first, second = tools.values()
    assert first.limit is second.limit and first.limit.workers == 3


def test_a_run_has_at_most_a_process_for_each_worker_of_a_tool(world):
    specs = [{"path": "tool.py:Search", "workers": count} for count in (8, 2)]
    assert most_processes(workflow(world, *specs)) == (2, "tool tool.py:Search has `workers: 2`")
    assert most_processes(workflow(world, {"path": "tool.py:Search", "calls_per_second": 2})) is None


def test_hooks_wait_like_models_and_reach_the_tool_by_its_declared_name(world):
    spec = DeclaredTool(path="tool.py:Search", workers=1, declared="finder")
    flow = workflow(world, spec)
    tools = make_tools(flow, None)
    toolset = Toolset(flow.agents[0], tools)
    assert toolset.name_of("finder") == toolset.name_of("tool.py:Search") == "search"

    async def main() -> None:
        arguments = ("search", {"query": "q"}, {}, {}, lambda _: None)
        await asyncio.gather(*(toolset.call(*arguments, by_model=model) for model in (True, False)))

    run(main())
    assert only(tools).starts == [0, 1]


def test_the_time_before_a_call_is_told_apart_from_its_own(world):
    tool = only(make_tools(workflow(world, {"path": "tool.py:Search", "workers": 1, "calls_per_second": 0.2}), None))

    async def main() -> list[ToolResult]:
        return await asyncio.gather(*(call(tool, seconds=2) for _ in range(3)))

    assert [(result.seconds, result.waited) for result in run(main())] == [(2, 0), (2, 5), (2, 10)]


def test_a_call_that_times_out_says_how_long_it_waited(world):
    spec = {"path": "tool.py:Search", "workers": 1, "timeout_s": 3}
    tool = only(make_tools(workflow(world, spec), None))

    async def main() -> list[ToolResult]:
        return await asyncio.gather(*(call(tool, seconds=9) for _ in range(2)))

    assert [(result.status, result.seconds, result.waited) for result in run(main())] == [
        ("timeout", 3, 0),
        ("timeout", 3, 3),
    ]
