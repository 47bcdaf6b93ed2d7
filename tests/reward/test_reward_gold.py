"""Whether the right answer can earn its reward, asked of real workflows and of data that no answer solves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipe.dag.core.errors import GraderFault, UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward import gold
from recipe.dag.reward.gold import boxed_answer_is_right, check_gold

ROOT = Path(__file__).parents[2]
RATIONALE = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether she sold 48+24 = <<48+24=72>>72 clips.\n#### 72"
)
GRADING = ["retool_ma", "retool_ma_separate", "no_tool", "single_agent_tool", "ppo", "debate", "cory", "marft"]


def check(workflow: str | Path, truths: list[str]) -> None:
    path = ROOT / f"workflows/workflow_{workflow}.yaml" if isinstance(workflow, str) else workflow
    samples = [{"ground_truth": truth} for truth in truths]
    asyncio.run(check_gold(load_workflow(path), samples, "data.train_files"))


@pytest.mark.parametrize(
    "truth",
    ["72", "1,234", r"\frac{1}{2}", "(3, 4)", "x^2 + 1", "Monday", r"\boxed{7}", r"50\%", "-0.5", r"\text{(C)}"],
)
def test_an_answer_is_graded_right_against_itself(truth):
    assert asyncio.run(boxed_answer_is_right(truth))


@pytest.mark.parametrize("truth", [RATIONALE, RATIONALE.replace("\n", " "), "", " ", "It is a long story " * 10])
def test_a_text_that_no_answer_equals_is_not(truth):
    assert not asyncio.run(boxed_answer_is_right(truth))


@pytest.mark.parametrize("workflow", GRADING)
def test_rationales_as_ground_truths_are_refused_in_one_line(workflow):
    with pytest.raises(UserError) as caught:
        check(workflow, [RATIONALE] * 40)
    message = str(caught.value)
    assert message.startswith("data.train_files: 16 of 16 ground truths") and "\n" not in message
    assert "Natalia sold" in message and "data.answer_format" in message


@pytest.mark.parametrize("workflow", GRADING)
def test_answers_pass_in_silence(workflow, capsys):
    check(workflow, ["72", r"\frac{1}{2}"])
    assert capsys.readouterr().err == ""


def test_some_that_fail_are_a_warning(capsys):
    check("no_tool", ["72"] * 15 + [RATIONALE])
    assert capsys.readouterr().err.startswith("warning: data.train_files: 1 of 16 ground truths")


def test_samples_of_the_whole_file_are_looked_at(capsys):
    check("no_tool", ["72"] * 900 + [RATIONALE] * 100)
    assert "1 of 16" in capsys.readouterr().err


def test_rewards_that_do_not_grade_answers_are_not_checked():
    for file in ("workflows/workflow_marft_code", "examples/games/workflows/workflow_climbing_simultaneous"):
        check(ROOT / f"{file}.yaml", [RATIONALE] * 3)


def test_a_fault_of_the_grader_says_nothing_about_the_data(monkeypatch, capsys):
    async def broken(prediction, truth):
        raise GraderFault("no worker", where="grader")

    monkeypatch.setattr(gold, "grade", broken)
    check("no_tool", ["72"])
    assert capsys.readouterr().err == ""


def test_a_users_reward_declares_its_own_check(tmp_path):
    (tmp_path / "score.py").write_text(
        "from recipe.dag.reward.gold import earned_by\n\n"
        "async def upper(truth):\n    return truth.isupper()\n\n"
        "@earned_by(upper)\ndef score(episode):\n    return {}\n"
    )
    text = (ROOT / "workflows/workflow_no_tool.yaml").read_text()
    text = text.replace("recipe/retool_ma/hooks.py:outcome_reward", "score.py:score").split("    args")[0]
    (tmp_path / "own.yaml").write_text(text)
    check(tmp_path / "own.yaml", ["YES"])
    with pytest.raises(UserError, match="1 of 1 ground truths .* 'no'"):
        check(tmp_path / "own.yaml", ["no"])
