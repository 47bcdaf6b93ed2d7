"""The teacher of the baselines: what it shows, and how often it errs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.retool_ma.baseline_teacher import Teacher

WORKFLOWS = Path(__file__).parents[2] / "workflows"


def teacher(name: str, seed: int = 0) -> Teacher:
    return Teacher(load_workflow(WORKFLOWS / f"workflow_{name}.yaml"), seed)


def boxed(text: str) -> int:
    match = re.fullmatch(r"FINAL ANSWER: \\boxed\{(-?\d+)\}", text)
    assert match, text
    return int(match[1])


def test_without_a_tool_it_answers_at_once_and_is_often_wrong():
    shown = teacher("no_tool")
    problems = shown.problems(400, 64)
    right = [
        boxed(demonstration.answer) == problem.answer for problem in problems for demonstration in shown.teach(problem)
    ]
    assert len(right) == 400 and 0.45 < sum(right) / 400 < 0.62


def test_with_a_tool_it_reads_the_output_that_the_loop_appends():
    shown = teacher("single_agent_tool")
    broken = misread = 0
    for problem in shown.problems(400, 64):
        program, read = shown.teach(problem)
        assert program.answer.startswith("```python\nprint(") and program.answer.endswith("\n```")
        assert read.messages[:-2] == program.messages and read.messages[-2]["content"] == program.answer
        assert [message["role"] for message in read.messages[-2:]] == ["assistant", "user"]
        output = read.messages[-1]["content"].strip()
        broken += "SyntaxError" in output
        misread += "SyntaxError" not in output and boxed(read.answer) != int(output)
    assert 0.01 < broken / 400 < 0.09 and 0.005 < misread / 400 < 0.09


def test_the_same_seed_shows_the_same():
    answers = [
        [d.answer for p in t.problems(20, 64) for d in t.teach(p)] for t in (teacher("no_tool"), teacher("no_tool"))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "message"), [("retool_ma", "one rollout node, not 3"), ("retool", "tool_loop.format")]
)
def test_other_workflows_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        teacher(name)
