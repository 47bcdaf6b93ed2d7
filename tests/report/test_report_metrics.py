from __future__ import annotations

import math

import pytest

from recipe.dag.report.metrics import rollout_metrics, validation_metrics
from recipe.dag.types.model import Model
from recipe.dag.types.record import Skip
from recipe.dag.workflow.agent_schema import Agent, Policy
from recipe.dag.workflow.schema import Workflow


def workflow_of(*agents: Agent) -> Workflow:
    policies = {"main": Policy(model=Model(path="m"))}
    return Workflow(path="w.yaml", dag_id="w", agents=agents, policies=policies, nodes=())


def test_agent_metrics(make_call, make_episode):
    calls = [
        make_call(sampled=2, reward=1.0, stop_reason="length", generations=3),
        make_call(sampled=6, reward=-0.5, prompt_ids=[1] * 20),
        make_call(sampled=0, text=""),
        make_call(sampled=4, text=" \n"),
    ]
    metrics = rollout_metrics([make_episode(calls=calls)])
    expected = {
        "calls": 4,
        "reward/mean": 0.25,
        "reward/min": -0.5,
        "reward/max": 1.0,
        "response_length/mean": 3.0,
        "response_length/max": 6.0,
        "prompt_length/mean": 12.5,
        "truncated": 0.25,
        "unscored": 0,
        "void": 0.5,
        "generations": 1.5,
    }
    agent = {key.removeprefix("agent/solver/"): value for key, value in metrics.items() if key.startswith("agent/")}
    assert agent == expected


def test_numbers_that_reward_nodes_report_are_averaged(make_episode, fault):
    infos = [{"contribution/solve": 1.0, "answer": "4", "parsed": True}, {"contribution/solve": 0.0}, {"rounds": 2}]
    episodes = [make_episode(info=info) for info in infos]
    metrics = rollout_metrics([*episodes, make_episode(info={"rounds": 9}, fault=fault, faults=[fault])])
    info = {key: value for key, value in metrics.items() if key.startswith("info/")}
    assert info == {"info/contribution/solve": 0.5, "info/parsed": 1.0, "info/rounds": 2.0}


def test_tool_metrics_tell_failed_from_refused_from_lost(make_call, make_episode, make_result):
    results = [make_result(s) for s in ("success", "failed", "timeout", "success", "invalid", "fault")]
    calls = [make_call(tool_results=results), make_call()]
    metrics = rollout_metrics([make_episode(calls=calls)])
    assert metrics["agent/solver/tool_calls"] == 3.0
    assert metrics["agent/solver/tool_rate"] == 0.5
    assert metrics["agent/solver/tool_success"] == 0.5
    assert metrics["agent/solver/invalid_calls"] == pytest.approx(1 / 6)
    assert metrics["agent/solver/ended_by_invalid_calls"] == 0
    streak = [make_call(tool_results=[make_result("invalid")], stop_reason="invalid_calls"), make_call()]
    assert rollout_metrics([make_episode(calls=streak)])["agent/solver/ended_by_invalid_calls"] == 1


def test_episode_metrics_and_masking(make_call, make_episode, make_result, fault):
    episodes = [
        make_episode(outcome=1.0, seconds=1.0, turns=2, calls=[make_call(reward=0.5), make_call("judge", reward=1.0)]),
        make_episode(outcome=0.0, seconds=3.0, turns=1, calls=[make_call(reward=0.0)], attempts=2, faults=[fault]),
        make_episode(outcome=None, seconds=2.0, calls=[make_call(tool_results=[make_result(attempts=2)])]),
        make_episode(
            outcome=1.0,
            seconds=99.0,
            calls=[make_call(reward=77.0)],
            attempts=3,
            fault=fault,
            faults=[fault, fault, fault | {"boundary": "model"}],
        ),
    ]
    metrics = rollout_metrics(episodes)
    expected = {
        "episode/count": 4,
        "episode/accuracy": 0.5,
        "episode/accuracy_all": pytest.approx(1 / 3),
        "episode/reward": 0.75,
        "episode/turns": pytest.approx(4 / 3),
        "episode/seconds/mean": 2.0,
        "episode/seconds/max": 3.0,
        "episode/masked": 0.25,
        "episode/attempts": 1.75,
        "faults/total": 4,
        "faults/sandbox": 3,
        "faults/model": 1,
        "faults/retried_tools": 1,
        "tokens/sampled": 16,
        "tokens/prompt": 40,
    }
    assert {key: value for key, value in metrics.items() if not key.startswith(("agent/", "tool/"))} == expected
    assert metrics["agent/solver/reward/max"] == 0.5


def test_what_was_not_measured_is_absent(make_call, make_episode, fault):
    plain = rollout_metrics([make_episode(outcome=None, calls=[make_call(reward=None)])])
    absent = ("accuracy", "reward", "tool", "invalid", "staleness", "retried")
    assert not [key for key in plain if any(word in key for word in absent)]
    assert plain["faults/total"] == 0 and plain["episode/masked"] == 0
    masked = rollout_metrics([make_episode(fault=fault, faults=[fault])])
    assert masked["episode/masked"] == 1.0
    assert "episode/accuracy" not in masked and "episode/seconds/mean" not in masked
    assert rollout_metrics([]) == {"episode/count": 0, "tokens/prompt": 0, "tokens/sampled": 0, "faults/total": 0}


def test_workflow_orders_agents_and_shows_those_that_never_moved(make_call, make_episode):
    workflow = workflow_of(
        Agent(name="idle", policy="main"),
        Agent(name="coder", policy="main", tools=("code_interpreter",)),
        Agent(name="solver", policy="main"),
    )
    metrics = rollout_metrics([make_episode(calls=[make_call("solver"), make_call("coder")])], workflow)
    assert [key for key in metrics if key.endswith("/calls")] == [
        "agent/idle/calls",
        "agent/coder/calls",
        "agent/solver/calls",
    ]
    assert [key for key in metrics if key.startswith("agent/idle/")] == ["agent/idle/calls"]
    assert metrics["agent/idle/calls"] == 0
    assert metrics["agent/coder/tool_rate"] == metrics["agent/coder/tool_calls"] == 0.0
    assert "agent/coder/tool_success" not in metrics
    assert "agent/solver/tool_calls" not in metrics


def test_skipped_moves_and_rounds_are_told_per_agent(make_call, make_episode):
    def move(node: str, agent: str, turn: int = 0, round: int = 0):
        return make_call(agent, node=node, turn=turn, round=round)

    talk = [move("a", "left", turn, round) for turn, rounds in ((0, 3), (1, 1)) for round in range(rounds)]
    judge = Skip("judge", "judge", 1, 0, "when")
    away = Skip("a", "left", 2, 0, "when")
    first = make_episode(calls=[*talk, move("judge", "judge")], skips=[judge, away], ended_by="done")
    second = make_episode(
        index=1, calls=[move("a", "left")], skips=[Skip("judge", "judge", 0, 0, "when")], ended_by="turns"
    )
    for metrics in (rollout_metrics([first, second]), rollout_metrics([first, second], looped_workflow())):
        assert metrics["agent/left/rounds"] == pytest.approx((3 + 1 + 0 + 1) / 4)
        assert metrics["agent/judge/skipped"] == pytest.approx(2 / 3)
        assert "agent/judge/rounds" not in metrics
        assert [metrics[f"episode/ended_by/{reason}"] for reason in ("done", "length", "turns")] == [0.5, 0.0, 0.5]
    assert rollout_metrics([second], looped_workflow())["agent/left/skipped"] == 0.0
    assert "agent/left/skipped" not in rollout_metrics([second])


def looped_workflow() -> Workflow:
    return Workflow(
        path="/w.yaml",
        dag_id="talk",
        agents=[{"name": "left", "policy": "main"}, {"name": "judge", "policy": "main"}],
        policies={"main": {"model": {"path": "m"}}},
        loops={"talk": {"nodes": ["a"], "max_rounds": 3}},
        nodes=[
            {"id": "a", "agent": "left"},
            {"id": "judge", "agent": "judge", "when": {"node": "a", "exists": True}},
        ],
    )


def test_staleness_per_policy(make_call, make_episode):
    calls = [make_call(weight_version=4), make_call(weight_version=5), make_call("b", policy="small", weight_version=5)]
    metrics = rollout_metrics([make_episode(calls=calls)], versions={"main": 5, "small": 5, "unused": 1})
    staleness = {key: value for key, value in metrics.items() if "staleness" in key}
    assert staleness == {"policy/main/staleness": 0.5, "policy/small/staleness": 0.0}


def test_cached_shares_are_of_tokens_and_absent_for_servers_that_report_none(make_call, make_episode):
    lengths = [("a", 10, 0), ("a", 30, 20), ("b", 40, 0)]
    calls = [make_call(node, prompt_ids=[1] * length, cached_tokens=cached) for node, length, cached in lengths]
    calls.append(make_call("b", policy="small"))
    metrics = rollout_metrics([make_episode(calls=calls)])
    shares = {key: value for key, value in metrics.items() if key.endswith("cached_tokens_share")}
    expected = {"node/a": 0.5, "policy/main": 0.25, "node/b": 0.0}
    assert shares == {f"{name}/cached_tokens_share": share for name, share in expected.items()}


def test_prefix_and_plain_floats(make_episode):
    metrics = rollout_metrics([make_episode(outcome=1.0)], prefix="val/")
    assert all(key.startswith("val/") for key in metrics)
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def test_validation_weighs_problems_not_episodes(make_episode, fault):
    episodes = [make_episode("a", i, outcome=float(i == 0)) for i in range(4)]
    episodes += [make_episode("b", 0, outcome=1.0), make_episode("b", 1, outcome=0.0, fault=fault)]
    metrics = validation_metrics(episodes)
    assert metrics["val/accuracy"] == pytest.approx((0.25 + 1.0) / 2)
    assert metrics["val/pass@1"] == pytest.approx(metrics["val/accuracy"])
    assert metrics["val/pass@2"] == pytest.approx(0.5)
    assert metrics["val/pass@4"] == 1.0
    # of a alone, since b has one graded episode
    assert (metrics["val/majority@4"], metrics["val/atleast_1@4"], metrics["val/atleast_2@4"]) == (0.0, 1.0, 0.0)
    assert metrics["val/episode/masked"] == pytest.approx(1 / 6)
    assert not any(key.startswith("val/accuracy/") for key in metrics)


def test_validation_tells_data_sources_apart(make_episode):
    episodes = [make_episode("a", outcome=1.0), make_episode("b", outcome=0.0)]
    episodes[1].sample["data_source"] = "aime"
    metrics = validation_metrics(episodes)
    assert (metrics["val/accuracy/amc"], metrics["val/accuracy/aime"], metrics["val/accuracy"]) == (1.0, 0.0, 0.5)
    assert not any("@" in key for key in metrics)


def test_ungraded_validation_has_no_accuracy(make_episode):
    assert "val/accuracy" not in validation_metrics([make_episode(outcome=None)])


def test_a_lost_episode_counts_as_not_solved_in_the_accuracy_over_all(make_episode, fault):
    """A reward that fails on every wrong answer must not raise the accuracy."""
    lost = {"fault": fault, "faults": [fault], "outcome": None}
    episodes = [make_episode("a", 0, outcome=1.0), make_episode("a", 1, **lost), make_episode("b", 0, **lost)]
    metrics = validation_metrics(episodes)
    assert (metrics["val/accuracy"], metrics["val/accuracy_all"]) == (1.0, 0.25)
    assert metrics["val/episode/accuracy"] == 1.0 and metrics["val/episode/accuracy_all"] == pytest.approx(1 / 3)
    whole = validation_metrics([make_episode("a", outcome=1.0), make_episode("b", outcome=0.0)])
    assert whole["val/accuracy"] == whole["val/accuracy_all"] == 0.5
    assert not [key for key in validation_metrics([make_episode(**lost)]) if "accuracy" in key]
