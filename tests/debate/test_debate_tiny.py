"""The debate's laptop run: what its teacher shows, and that it fits the configured lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.answer import extract_answer
from recipe.debate.teacher import NODES, WRONG_SOLUTION, Teacher
from recipe.tiny.careless import MISREADINGS, RIGHT_READING
from tests.tiny.lengths import check_lengths

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lessons():
    teacher = Teacher(load_workflow(ROOT / "workflows" / "workflow_debate.yaml"), 0)
    return [(problem, teacher.teach(problem)) for problem in teacher.problems(1000, 64)]


def test_only_who_differs_debates(lessons):
    for _, lesson in lessons:
        said = {d.role: extract_answer(d.answer, strict=True) for d in lesson}
        differ = said["solve_left"] != said["solve_right"]
        assert set(said) == set(NODES if differ else (*NODES[:2], "judge"))
    assert any(len(lesson) == 5 for _, lesson in lessons) and any(len(lesson) == 3 for _, lesson in lessons)


def test_the_teacher_is_careless_at_its_rate(lessons):
    for misread, rate in ((False, 1.0), (True, RIGHT_READING)):
        kind = [(problem, lesson) for problem, lesson in lessons if (problem.family in MISREADINGS) == misread]
        right = [lesson[0].answer == f"\\boxed{{{problem.answer}}}" for problem, lesson in kind]
        # A number of the problem may happen to be its answer, and so may what a misreading gives.
        assert rate * (1 - WRONG_SOLUTION) - 0.05 <= sum(right) / len(right) <= rate + 0.1


def test_everybody_hears_what_was_said_before(lessons):
    for problem, lesson in lessons:
        *before, judge = lesson
        assert problem.text in judge.messages[-1]["content"]
        assert all(f"{d.role} said:\n{d.answer}" in judge.messages[-1]["content"] for d in before)


def test_dialogues_fit_the_configured_lengths(lessons):
    check_lengths([d for _, lesson in lessons[:600] for d in lesson], 120, 16)


def test_another_workflow_is_refused():
    with pytest.raises(UserError, match="needs the rollout nodes solve_left, .* not rollout_reasoner, rollout_actor"):
        Teacher(load_workflow(ROOT / "workflows" / "workflow_marft_tiny.yaml"), 0)
