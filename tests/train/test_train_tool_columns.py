"""What rows of verl's data sets say about agents and tools is done, or refused in one line."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.data import load_samples
from recipe.dag.train.resources import Resources

WORKFLOW = """\
dag_id: demo
agents: [{name: solver, policy: main, tools: TOOLS}]
policies: {main: {model: {path: m}}}
nodes:
  - {id: solve, agent: solver}
  - {id: reward, reward: r.py:score, after: solve}
"""
TOOL = """\
class Search:
    schema = {"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}
    name = "search"

    def __init__(self, index="all"):
        self.index = index

    async def execute(self, arguments, state, *, site="web"): ...
    async def close(self): ...
"""


@pytest.fixture
def open_tools(tmp_path):
    """Opens the tools of a workflow whose agent has `tools`, for rows with these columns."""

    def open_tools(tools: str, *columns: dict, code: str = TOOL) -> Resources:
        (tmp_path / "tool.py").write_text(code)
        (tmp_path / "r.py").write_text("def score(episode): return {}")
        (tmp_path / "workflow.yaml").write_text(WORKFLOW.replace("TOOLS", tools))
        prompt = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
        pq.write_table(pa.Table.from_pylist([prompt | row for row in columns or ({},)]), tmp_path / "data.parquet")
        samples = load_samples(str(tmp_path / "data.parquet"))
        workflow = load_workflow(tmp_path / "workflow.yaml")
        # Nothing of a sandbox is configured: what is refused is refused before one is started.
        return asyncio.run(
            Resources.open(OmegaConf.create({"sandbox": {}, "output_dir": str(tmp_path)}), workflow, samples)
        )

    return open_tools


def test_a_tool_is_made_with_its_kwargs(open_tools):
    box = open_tools("[{path: tool.py:Search, kwargs: {index: maths}}]")
    (tool,) = box.tools.values()
    assert (type(tool).__name__, tool.index) == ("Search", "maths")


def test_a_tool_has_the_limits_that_the_workflow_sets(open_tools):
    box = open_tools("[{path: tool.py:Search, workers: 3, calls_per_second: 2, timeout_s: 4}]")
    (tool,) = box.tools.values()
    assert (tool.limit.workers, tool.limit.calls_per_second, tool.timeout_s) == (3, 2, 4)


def test_tools_kwargs_are_read_where_verl_has_them_and_at_the_top(open_tools):
    row = {"search": {"create_kwargs": {"index": "maths"}, "execute_kwargs": {"site": "wiki"}}}
    other = {"search": {"create_kwargs": {"index": "art"}}}  # parquet fills in execute_kwargs: null
    open_tools("['tool.py:Search']", {"tools_kwargs": row}, {"tools_kwargs": other})
    open_tools("['tool.py:Search']", {"extra_info": {"tools_kwargs": row}, "agent_name": "single_turn_agent"})
    open_tools("[]", {"agent_name": "tool_agent"})  # the baseline without a tool takes the same data


@pytest.mark.parametrize(
    ("tools", "column", "message"),
    [
        ("[]", {"agent_name": "react_agent"}, "sample 0: agent_name 'react_agent' is not an agent of demo"),
        (
            "[code_interpreter], tool_loop: {format: hermes}",
            {"agent_name": "single_turn_agent"},
            "sample 0: agent_name 'single_turn_agent' is not an agent of demo",
        ),
        ("[]", {"tools_kwargs": {"search": {"create_kwargs": {"k": 1}}}}, "no agent has a tool of that name"),
        ("['tool.py:Search']", {"tools_kwargs": {"find": {"create_kwargs": {"k": 1}}}}, "tools: search"),
        ("['tool.py:Search']", {"tools_kwargs": {"search": {"execute_kwargs": {"k": 1}}}}, "has no parameter `k`"),
        ("['tool.py:Search']", {"tools_kwargs": {"search": {"release_kwargs": {"k": 1}}}}, "is not supported"),
        ("['tool.py:Search']", {"tools_kwargs": {"search": {"create": {"k": 1}}}}, "supported: create_kwargs"),
        ("['tool.py:Search']", {"tools_kwargs": {"search": "x"}}, "must be a struct of create_kwargs"),
        ("['tool.py:Search']", {"tools_kwargs": "x"}, "tools_kwargs must be a struct"),
        (
            "[code_interpreter]",
            {"tools_kwargs": {"code_interpreter": {"create_kwargs": {"memory": 1}}}},
            "the tool accepts ground_truth; remove it",
        ),
    ],
)
def test_what_no_tool_or_agent_would_read_is_refused(open_tools, tools, column, message):
    with pytest.raises(UserError) as raised:
        open_tools(tools, column, {})
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.index = index", "raise OSError('no index')", "tool tool.py:Search: OSError: no index"),
        ('"name": "search"', '"called": "search"', "`schema` is dict"),
        ("class Search:", "from types import SimpleNamespace as Base\nclass Search(Base):", None),
    ],
)
def test_a_tool_that_cannot_work_is_refused_before_anything_starts(open_tools, old, new, message):
    if message is None:  # the file alone cannot tell what a foreign base class has
        new, message = new + "\n    pass\nclass Unused:", "has no method `execute`"
    with pytest.raises(UserError, match=message):
        open_tools("['tool.py:Search']", code=TOOL.replace(old, new))
