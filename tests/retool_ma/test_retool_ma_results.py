"""The published keys of results.json and summary.json, from an episode of the shipped workflow and its hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.report.results import write_results
from recipe.dag.types.record import Call, Episode, ToolResult
from recipe.retool_ma.hooks import Executor, Verifier
from tests.episode.conftest import world  # noqa: F401  # a fixture

PLAN = {"reasoning": "multiply", "code_plan": "print product", "expected_output": "4"}
WRITTEN = {
    "planner": f"Here it is: {json.dumps(PLAN)}",
    "executor": "Sure.\n```python\nproduct = 2 * 2\nprint(product)\n```",
    "verifier": "FINAL ANSWER: \\boxed{4}",
}
CODE = "product = 2 * 2\nprint(product)"


def test_metadata_of_what_failed():
    def call(**fields: Any) -> Call:
        return Call("n", "a", 0, "main", 0, **fields)

    late = call(tool_results=[ToolResult("code_interpreter", {"code": "x"}, "timeout", "too slow")])
    assert Executor.results_metadata(late, Episode("u", 0, {}))["tool_metadata"] == {
        **{"status": "failed", "timeout": True, "return_code": None},
        **{"stdout": "", "stderr": ""},
    }
    lost = {"code": "print(", "tool_metadata": {}, "tool_response": ""}
    assert Executor.results_metadata(call(parsed={"code": "print("}), Episode("u", 0, {})) == lost
    graded = [Episode("u", 0, {}, outcome=0.0, info=info) for info in ({}, {"final_reward": -1.0})]
    graded.append(Episode("u", 0, {}, info={"final_reward": 1.0}, fault={"boundary": "sandbox"}))
    assert [Verifier.results_metadata(call(), episode)["reward"] for episode in graded] == [0.0, -1.0, None]


def test_what_the_shipped_hooks_return_has_the_published_keys(world, tmp_path):  # noqa: F811
    def run(arguments, state):
        return ToolResult("code_interpreter", arguments, "success", "4\n", stdout="4\n", stderr="", return_code=0)

    workflow = load_workflow(Path(__file__).parents[2] / "workflows" / "workflow_retool_ma.yaml")
    client = world.Client(lambda prompt, sampling, request: WRITTEN[request.rpartition("-")[2]])
    episode = world.play(workflow, client, [world.Tool("code_interpreter", run)])
    summary = write_results(tmp_path, [episode], workflow)
    (item,) = json.loads((tmp_path / "results.json").read_text())
    planner, executor, verifier = item["trajectory"]
    assert planner["metadata"] == {"parsed_plan": PLAN}
    assert {turn["agent_role"]: turn["agent_output"] for turn in item["trajectory"]} == WRITTEN
    ran = {"status": "success", "timeout": False, "return_code": 0, "stdout": "4\n", "stderr": ""}
    assert executor["metadata"] == {"code": CODE, "tool_metadata": ran, "tool_response": "4\n"}
    assert verifier["metadata"] == {"reward": item["final_reward"]}
    own = {turn["agent_role"]: turn["agent_reward"] for turn in item["trajectory"]}
    assert all(-1.0 <= reward <= 1.0 for reward in own.values()) and own["executor"] == pytest.approx(1.0)
    assert summary["reward_stats"] == pytest.approx(own) == item["metrics"]["reward_breakdown"]
    bonus = 0.5 * item["final_reward"]
    assert bonus and summary["team_reward_stats"] == pytest.approx({"planner": bonus, "executor": bonus})
    assert planner["team_reward"] == executor["team_reward"] == pytest.approx(bonus) and "team_reward" not in verifier
