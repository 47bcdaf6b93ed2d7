"""The ReTool reward: its values, its bonus, and what it never pays for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag import Call, Episode, ToolResult, UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.gold import check_gold
from recipe.retool.reward import retool_reward, wrong_reward

ROOT = Path(__file__).parents[2]


def program(code: str, status: str = "success") -> ToolResult:
    return ToolResult("code_interpreter", {"code": code}, status, "7")


def episode(answer: str | None, *results: ToolResult, truth: str = "25") -> Episode:
    call = Call("solve", "solver", 0, "main", 0, parsed={"answer": answer}, tool_results=list(results))
    return Episode("0", 0, {"ground_truth": truth}, calls=[call])


def paid(record: Episode, **options) -> float:
    return asyncio.run(retool_reward(record, **options))["solver"]


@pytest.mark.parametrize(
    ("answer", "reward"), [("25", 1.0), ("025", 1.0), ("25.0", 1.0), ("24", -1.0), (None, -1.0), ("", -1.0)]
)
def test_one_for_a_right_answer_and_minus_one_for_any_other(answer, reward):
    record = episode(answer)
    assert paid(record) == reward
    assert record.outcome == float(reward > 0) and record.info == {"final_reward": reward, "answer": answer or ""}


FIVE = [program(f"print({number})") for number in range(5)]
TWELVE = [program(f"print({number})") for number in range(12)]


@pytest.mark.parametrize(
    ("results", "floor", "reward"),
    [
        (FIVE, None, -1.0),
        ([], -0.6, -1.0),
        (FIVE[:1], -0.6, -0.9),
        (FIVE, -0.6, -0.6),
        (FIVE, 0, -0.5),
        (TWELVE, 0, 0.0),
    ],
)
def test_a_wrong_answer_gains_by_programs_up_to_the_floor(results, floor, reward):
    record = episode("24", *results)
    assert paid(record, floor=floor) == pytest.approx(reward) and record.outcome == 0.0


def test_a_program_that_failed_or_is_repeated_gains_nothing_except_as_published():
    results = [program("print(1)"), program("print(1)"), program("1/0", "failed"), program("", "invalid")]
    assert paid(episode("24", *results), floor=0) == pytest.approx(-0.9)
    assert paid(episode("24", *results), floor=0, compat=True) == pytest.approx(-0.6)


def test_a_right_answer_gains_nothing_by_programs():
    assert paid(episode("25", *FIVE), floor=0) == 1.0


@given(st.integers(0, 1000), st.one_of(st.none(), st.floats(-1, 0)), st.floats(0, 10))
def test_a_wrong_answer_stays_within_its_bounds(count, floor, bonus):
    assert -1 <= wrong_reward(count, floor, bonus) <= (-1 if floor is None else floor)


def test_the_floor_is_that_of_the_published_formula():
    # verl: min(-0.6, -1 + 0.1 * (num_turns - 2) / 2), where k tool calls make 2 k + 2 turns
    for calls in range(12):
        turns = 2 * calls + 2
        assert wrong_reward(calls, -0.6, 0.1) == pytest.approx(min(-0.6, -1 + 0.1 * (turns - 2) / 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"floor": 0.5}, "floor is 0.5; write a number from -1 to 0, or null"),
        ({"floor": -2}, "floor is -2"),
        ({"turn_bonus": -1}, "turn_bonus is -1; write 0 or more"),
        ({"agent": "writer"}, "agent 'writer' made no call; agents that did: solver; set args.agent"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        paid(episode("25"), **options)


def test_a_sample_without_a_ground_truth_is_refused():
    record = episode("25")
    record.sample = {}
    with pytest.raises(UserError, match="no ground_truth"):
        paid(record)


def test_ground_truths_that_no_answer_earns_are_found_before_the_run():
    workflow = load_workflow(ROOT / "workflows" / "workflow_retool.yaml")
    asyncio.run(check_gold(workflow, [{"ground_truth": "25"}], "data.train_files"))
    with pytest.raises(UserError, match="never graded right"):
        asyncio.run(check_gold(workflow, [{"ground_truth": "   "}], "data.train_files"))
