from __future__ import annotations

import json

import pytest

from recipe.dag.report.results import results_list, summarise, write_results
from recipe.dag.types.record import Result, Skip
from recipe.dag.workflow.schema import Workflow

WORKFLOW = Workflow(path="w", dag_id="w", agents=[], policies={}, nodes=[])


@pytest.fixture
def retool(make_call, make_episode, make_result):
    """A planner, executor and verifier on one problem."""

    def build(uid="u0", index=0, *, status="success", outcome=1.0, rewards=(0.4, 1.0, 1.0), **fields):
        run = make_result(
            status, arguments={"code": "print(6 * 7)"}, text="42\n", stdout="42\n", stderr="", return_code=0
        )
        plan = {"reasoning": "multiply", "code_plan": "6 * 7", "expected_output": "42"}
        calls = [
            make_call("planner", reward=rewards[0], parsed={"plan": plan, "parsed_ok": True}, agent_group=0),
            make_call("executor", reward=rewards[1], tool_results=[run], agent_group=1, text="log", completion="code"),
            make_call("verifier", reward=rewards[2], agent_group=2, text="FINAL ANSWER: \\boxed{42}"),
        ]
        return make_episode(uid, index, calls=calls, outcome=outcome, **fields)

    return build


def test_item_of_a_retool_episode(retool):
    plan = {"reasoning": "multiply", "code_plan": "6 * 7", "expected_output": "42"}
    moves = [
        ("planner", "from planner", 0.4, {"plan": plan, "parsed_ok": True}),
        ("executor", "code", 1.0, {}),
        ("verifier", "FINAL ANSWER: \\boxed{42}", 1.0, {}),
    ]
    trajectory = [
        {
            "turn_id": number,
            "agent_role": agent,
            "agent_id": number,
            "agent_input": f"to {agent}",
            "agent_output": output,
            "agent_reward": reward,
            "metadata": {"parsed": parsed},
        }
        for number, (agent, output, reward, parsed) in enumerate(moves)
    ]
    run = {"code": "print(6 * 7)", "status": "success", "stdout": "42\n", "stderr": "", "passed": True}
    metrics = {
        "is_correct": True,
        "code_execution": {"attempts": 1, "passes": 1, "failures": 0, "pass_rate": 1.0, "invalid_calls": 0},
        "trajectory_length": 3,
        "reward_breakdown": {"planner": 0.4, "executor": 1.0, "verifier": 1.0},
    }
    item = {"prompt": "problem u0", "label": "42", "trajectory": trajectory, "code_runs": [run]}
    assert results_list([retool()]) == [item | {"final_reward": 1.0, "metrics": metrics}]


def test_failed_code_and_a_graders_own_verdict(retool):
    (item,) = results_list([retool(status="timeout", outcome=0.0, info={"final_reward": -1.0})])
    assert item["code_runs"][0]["status"] == "failed" and item["code_runs"][0]["passed"] is False
    counts = {"attempts": 1, "passes": 0, "failures": 1, "pass_rate": 0.0, "invalid_calls": 1}
    assert item["metrics"]["code_execution"] == counts
    assert item["final_reward"] == -1.0
    assert item["metrics"]["is_correct"] is False


def test_a_faulted_episode_has_an_error_and_no_metrics(retool, fault):
    (item,) = results_list([retool(fault=fault, outcome=None)])
    assert item["error"] == "sandbox fault at execute: connection refused"
    assert "metrics" not in item and item["final_reward"] is None
    assert len(item["trajectory"]) == 3


def test_other_agents_show_what_they_parsed_and_lost_calls_are_no_attempts(make_call, make_episode, make_result):
    results = [make_result("fault"), make_result("success", name="search", arguments={"query": "x"})]
    call = make_call("debater", parsed={"vote": "A"}, tool_results=results, reward=None)
    (item,) = results_list([make_episode(calls=[call, call])])
    assert item["trajectory"][0]["metadata"] == {"parsed": {"vote": "A"}}
    assert item["trajectory"][0]["agent_reward"] is None
    assert item["code_runs"] == [] and item["metrics"]["code_execution"]["pass_rate"] == 0.0
    assert item["metrics"]["reward_breakdown"] == {} and item["metrics"]["is_correct"] is None


def test_rounds_results_and_skipped_nodes_are_shown_where_there_are_any(make_call, make_episode, tmp_path):
    vote = Result("vote", 0, 1, "4", {"answer": "4", "share": 1.0, "votes": {"4": 2}})
    skip = Skip("judge", "judge", 0, 0, "when")
    talk = make_episode("u0", calls=[make_call(round=0), make_call(round=1)], results=[vote], skips=[skip])
    silent = make_episode("u1", calls=[], skips=[skip], outcome=0.0)
    first, second = results_list([talk, silent])
    assert [move.get("round") for move in first["trajectory"]] == [None, 1]
    assert first["results"] == [
        {"node": "vote", "turn": 0, "round": 1, "text": "4", "parsed": {"answer": "4", "share": 1.0, "votes": {"4": 2}}}
    ]
    shown = [{"node": "judge", "agent": "judge", "turn": 0, "round": 0, "reason": "when"}]
    assert first["skips"] == second["skips"] == shown
    assert "results" not in second and second["trajectory"] == []
    assert summarise([talk, silent])["avg_trajectory_length"] == 1.0
    assert write_results(tmp_path, [talk, silent], WORKFLOW)["num_samples"] == 2


def test_only_an_agent_without_a_reward_of_its_own_has_the_teams(make_call, make_episode):
    both = make_call("coder", reward=1.5, reward_parts={"role": 1.0, "team": 0.5})
    alone = make_call("debater", reward=0.5, reward_parts={"team": 0.5})
    episodes = [make_episode(calls=[both, alone])]
    summary = summarise(episodes, {"team"})
    assert summary["reward_stats"] == {"coder": 1.0, "debater": 0.5}
    assert summary["team_reward_stats"] == {"coder": 0.5}
    assert "team_reward" not in results_list(episodes, {"team"})[0]["trajectory"][1]


def test_rewards_of_several_calls_add_up(make_call, make_episode):
    calls = [make_call(reward=0.25), make_call(reward=0.5), make_call("judge", reward=1.0)]
    (item,) = results_list([make_episode(calls=calls)])
    assert item["metrics"]["reward_breakdown"] == {"solver": 0.75, "judge": 1.0}


def test_summary(retool, fault):
    episodes = [
        retool("a", outcome=1.0, rewards=(0.4, 1.0, 1.0)),
        retool("b", outcome=0.0, rewards=(-0.2, -0.4, 0.0), status="failed"),
        retool("c", outcome=0.0, rewards=(0.4, 0.6, 0.0)),
        retool("d", outcome=None, rewards=(9.0, 9.0, 9.0), fault=fault),
    ]
    summary = summarise(episodes)
    tools = summary.pop("tool_metrics")
    assert tools["summary"] == {"total": 4, "successful": 3, "failed": 1, "tools_count": 1}
    assert summary == {
        "num_samples": 3,
        "num_errors": 1,
        "num_graded": 3,
        "most_frequent_error": "sandbox fault in execute: connection refused (1 of 1)",
        "final_accuracy": pytest.approx(1 / 3),
        "final_accuracy_all": pytest.approx(1 / 4),
        "avg_trajectory_length": 3.0,
        "code_metrics": {
            "total_attempts": 3,
            "total_passes": 2,
            "total_failures": 1,
            "overall_pass_rate": pytest.approx(2 / 3),
            "pass_rate_when_correct": 1.0,
            "pass_rate_when_incorrect": 0.5,
            "avg_calls_per_problem": 1.0,
        },
        "reward_stats": {
            "planner": pytest.approx(0.2),
            "executor": pytest.approx(0.4),
            "verifier": pytest.approx(1 / 3),
        },
    }


def test_summary_of_nothing_is_all_zeros(retool, fault):
    for episodes in ([], [retool(fault=fault, outcome=None)]):
        summary = summarise(episodes)
        assert summary["num_samples"] == 0 and summary["num_errors"] == len(episodes)
        assert summary["final_accuracy"] is summary["final_accuracy_all"] is None
        assert summary["avg_trajectory_length"] == 0.0
        assert set(summary["code_metrics"].values()) == {0.0}
        assert summary["reward_stats"] == {}


def test_pass_rates_are_pooled_over_attempts(make_call, make_episode, make_result):
    busy = make_call(tool_results=[make_result("success")] + [make_result("failed")] * 3)
    calm = make_call(tool_results=[make_result("success")])
    summary = summarise([make_episode("a", calls=[busy], outcome=1.0), make_episode("b", calls=[calm], outcome=1.0)])
    assert summary["code_metrics"]["pass_rate_when_correct"] == pytest.approx(2 / 5)
    assert summary["code_metrics"]["pass_rate_when_incorrect"] == 0.0


def test_several_episodes_per_problem(retool, fault):
    episodes = [retool(uid, i, outcome=float(i < c)) for uid, c in [("a", 1), ("b", 0)] for i in range(2)]
    assert [item["sample_index"] for item in results_list(episodes)] == [0, 1, 0, 1]
    summary = summarise(episodes)
    assert summary["samples_per_problem"] == 2
    assert summary["avg@n"] == pytest.approx(0.25)
    assert summary["pass@k"] == {"1": pytest.approx(0.25), "2": pytest.approx(0.5)}
    assert summary["majority@n"] == 0.0
    assert summary["atleast_k@n"] == {"1": pytest.approx(0.5), "2": 0.0}
    assert "pass@k" not in summarise(episodes[::2]) and "majority@n" not in summarise(episodes[::2])
    assert "pass@k" not in summarise([retool("a", i, outcome=None, fault=fault) for i in range(2)])


def test_files_stand_in_dataset_order_and_hold_valid_json(tmp_path, retool):
    episodes = [retool("b", 1), retool("a", 0, rewards=(float("nan"), 1.0, 1.0)), retool("b", 0)]
    folder = tmp_path / "new" / "folder"
    summary = write_results(folder, episodes, WORKFLOW, uids=["a", "b"])
    items = json.loads((folder / "results.json").read_text())
    order = [("problem a", 0), ("problem b", 0), ("problem b", 1)]
    assert [(item["prompt"], item["sample_index"]) for item in items] == order
    assert items[0]["trajectory"][0]["agent_reward"] is None
    assert json.loads((folder / "summary.json").read_text())["num_samples"] == summary["num_samples"] == 3
    assert sorted(path.name for path in folder.iterdir()) == ["results.json", "summary.json"]
    write_results(folder, episodes, WORKFLOW)
    assert json.loads((folder / "results.json").read_text())[0]["prompt"] == "problem b"
