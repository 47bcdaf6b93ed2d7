"""Calls that the loss leaves out: which, what they pay, and that baselines keep them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipe.dag.episode.rows import rows_of
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.report.monitors import Monitors
from recipe.dag.train import kernels, trainer
from recipe.dag.train.call_filter import outside_loss, overlong_share, penalise_overlong, void_metrics
from recipe.dag.train.sampling import Sampler
from recipe.dag.types.record import Call, Episode, ToolResult
from tests.rows import of_calls, split_row
from tests.train.steps import run_step

ROOT = Path(__file__).parents[2]
BOX = "It is \\boxed{4}."


def call(agent: str = "a0", *, mask=(1, 1), stop="stop", policy="main", reward: float | None = 1.0, **more) -> Call:
    tokens = {"prompt_ids": [3], "response_ids": [5] * len(mask), "response_mask": list(mask)}
    return Call(
        agent.replace("a", "n"), agent, 0, policy, 0, **tokens, rollout_log_probs=[-1.0] * len(mask), stop_reason=stop,
        reward=reward, **more,
    )  # fmt: skip


def episode(*calls: Call, index: int = 0) -> Episode:
    return Episode("u", index, {}, calls=list(calls))


@pytest.fixture
def dapo():
    """Its agent generates 1,024 tokens at most; the last 256 of them cost."""
    return load_workflow(ROOT / "workflows" / "workflow_dapo.yaml")


@pytest.fixture
def simpletir():
    return load_workflow(ROOT / "workflows" / "workflow_simpletir.yaml")


@pytest.mark.parametrize(
    ("mask", "stop", "share"),
    [
        ([1] * 6, "stop", 0.0),
        ([1] * 7, "stop", 0.25),
        ([1] * 10, "stop", 1.0),
        ([1] * 6 + [0] * 9 + [1] * 8, "stop", 0.5),
        ([1] * 2, "length", 1.0),
        ([1] * 7, "max_generations", 0.25),
        ([], "length", 0.0),
    ],
)
def test_a_generation_costs_more_the_further_it_reaches_into_the_buffer(mask, stop, share):
    """Ten tokens at most, the last four of them cost; what a tool put in between does not count."""
    assert overlong_share(call(mask=mask, stop=stop), 10, 1000, 4) == share


@pytest.mark.parametrize(("mask", "share"), [([1, 0] * 8, 0.0), ([1, 0] * 9, 0.5), ([1, 0] * 10, 1.0), ([1] * 9, 0.75)])
def test_a_call_of_several_generations_costs_by_its_own_limit_too(mask, share):
    """Twenty tokens at most with what the tools return, ten in a generation; the last four of either cost."""
    assert overlong_share(call(mask=mask), 10, 20, 4) == share


def test_the_penalty_is_a_part_of_the_reward_of_scored_calls_of_trained_policies(dapo):
    long = [1] * (768 + 64)
    calls = [
        call("solver", mask=long),
        call("solver"),
        call("solver", mask=long, reward=None),
        call("solver", mask=long, policy="frozen"),
    ]
    faulty = episode(call("solver", mask=long))
    faulty.fault = {"boundary": "tool"}
    penalise_overlong([episode(*calls), faulty], dapo, 2048)
    assert [one.reward for one in calls] == [0.75, 1.0, None, 1.0] and faulty.calls[0].reward == 1.0
    assert calls[0].reward_parts == {"overlong": -0.25} and calls[1].reward_parts == {}


def test_calls_that_a_limit_cut_off_are_outside_of_the_loss(dapo):
    played = episode(*[call("solver", stop=stop) for stop in ("stop", "length", "abort", "max_generations")])
    played.dropped = [call("solver", stop="length")]
    assert outside_loss(played, dapo) == {1, 3, 4}
    algorithm = dapo.algorithm.model_copy(update={"overlong": None})
    assert outside_loss(played, dapo.model_copy(update={"algorithm": algorithm})) == set()


def code(status: str) -> list[ToolResult]:
    return [ToolResult("code_interpreter", {"code": "1"}, status, "")]


@pytest.mark.parametrize(
    ("given", "void"),
    [
        ({"text": BOX}, False),
        ({"text": "I am not sure.", "tool_results": code("success")}, True),  # its last turn
        ({"text": "```python\n1\n```", "stop": "max_generations", "ended_in_tool_call": True}, False),
        ({"text": "Let me th", "stop": "length"}, True),
        ({"text": "Four.", "parsed": {"answer": "4"}}, False),
        ({"text": BOX, "parsed": {"answer": None}}, True),
    ],
)
def test_a_turn_of_a_tool_loop_is_void_without_code_and_answer(simpletir, given, void):
    played = episode(call("solver", **given), call("other"), call("solver", text=BOX))
    played.dropped = [call("solver", text=BOX)]
    assert outside_loss(played, simpletir) == ({0, 2, 3} if void else set())


def test_the_share_of_void_turns_counts_the_calls_of_agents_with_tools(simpletir):
    lost = episode(call("solver", text="?"))
    lost.fault = {"boundary": "tool"}
    void = episode(call("solver", text="I am not sure."), call("other", text="?"))
    assert void_metrics([void, episode(call("solver", text=BOX)), lost], simpletir) == {"agent/solver/void_turns": 0.5}
    assert void_metrics([lost], simpletir) == {}


@pytest.mark.parametrize(("status", "void"), [("success", False), ("failed", False), ("invalid", True)])
def test_a_turn_whose_hook_runs_the_tools_is_void_where_none_ran(simpletir, status, void):
    agent = simpletir.agents[0].model_copy(update={"tool_loop": None})
    flow = simpletir.model_copy(update={"agents": (agent,)})
    played = episode(call("solver", text="log", tool_results=code(status)))
    assert outside_loss(played, flow) == ({0} if void else set())


def test_rows_say_which_of_their_calls_learn_merged_or_not():
    first, second = call(), call(mask=(1,))
    second.prompt_ids = [3, 5, 5, 8]
    (row,) = rows_of([episode(first, second)], outside_loss=lambda e: {0})
    assert of_calls(row, "learns") == (False, True) and row.loss_mask() == [0, 0, 0, 1]
    assert row.response_mask == [1, 1, 0, 1]
    assert [of_calls(one, "learns") for one in split_row(row)] == [(False,), (True,)]
    separate = rows_of([episode(first, second)], merge=False, outside_loss=lambda e: {0})
    assert [one.loss_mask() for one in separate] == [[0, 0], [1]]


def advantages(workflow, episodes, monkeypatch, outside) -> list[float]:
    given = {}
    monkeypatch.setattr(kernels, "prepare", lambda *args: None)
    monkeypatch.setattr(
        kernels, "old_log_probs", lambda p, b: b.columns.update(old_log_probs=[torch.zeros(2) for _ in b.rows])
    )
    monkeypatch.setattr(kernels, "update_actor", lambda p, b, a, *, seed: given.update(b.columns))
    step = run_step(workflow, rows_of(episodes, outside_loss=lambda e: outside), "main")
    assert step.metrics()["policy/main/trained_tokens"] == (0 if outside else 2 * len(episodes))
    return [one[0].item() for one in given["advantages"]]


def test_a_call_outside_of_the_loss_stays_in_the_baseline(workflow_of, monkeypatch):
    workflow = workflow_of(1, algorithm="estimator: grpo, scale: none")
    episodes = [episode(call(reward=reward), index=i) for i, reward in enumerate((1.0, 0.0, 0.5))]
    assert advantages(workflow, episodes, monkeypatch, {0}) == advantages(workflow, episodes, monkeypatch, ())


def test_a_run_charges_for_length_and_leaves_out_what_was_cut_off(dapo, monkeypatch):
    long, cut = call("solver", mask=[1] * 896), call("solver", stop="length")
    played = [episode(long), episode(cut, index=1)]

    async def roll_out(*args, **kwargs):
        return played

    monkeypatch.setattr(trainer, "roll_out", roll_out)
    run = SimpleNamespace(
        _runner_of=lambda workflow: None,
        _one_call_per_row=lambda: False,
        sampler=Sampler(1, 1, 0),
        inputs=SimpleNamespace(train=[{}]),
        batches_consumed=0,
        monitors=Monitors([], "report", dapo),
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2)),
            data=SimpleNamespace(max_response_length=2048),
        ),
    )
    rollouts = asyncio.run(trainer.Trainer._collect(run, 1, dapo))
    (charged,), (left_out,) = (row.calls for row in rollouts.rows)
    assert (charged.reward, charged.learns, left_out.reward, left_out.learns) == (0.5, True, 0.0, False)


def test_the_treatment_of_overlong_calls_may_be_for_some_agents(dapo):
    options = dapo.algorithm.overlong.model_copy(update={"agents": ("other",)})
    workflow = dapo.model_copy(update={"algorithm": dapo.algorithm.model_copy(update={"overlong": options})})
    calls = [call("solver", stop="length"), call("other", stop="length")]
    assert outside_loss(episode(*calls), workflow) == {1} and outside_loss(episode(*calls), dapo) == {0, 1}
    only = options.model_copy(update={"agents": ("solver",)})
    workflow = dapo.model_copy(update={"algorithm": dapo.algorithm.model_copy(update={"overlong": only})})
    penalise_overlong([episode(*calls)], workflow, 2048)
    assert [one.reward for one in calls] == [0.0, 1.0]
