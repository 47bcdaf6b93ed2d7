"""CORY's laptop run: what its teacher shows, and that it fits the configured lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.cory.teacher import REPEATED, WRONG_FIRST, Teacher
from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.answer import extract_answer
from recipe.tiny.careless import MISREADINGS, right_formula, value_of
from tests.tiny.lengths import check_lengths

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lessons():
    teacher = Teacher(load_workflow(ROOT / "workflows" / "workflow_cory.yaml"), 0)
    return [(problem, teacher.teach(problem)) for problem in teacher.problems(1000, 64)]


def test_the_teacher_is_careless_at_its_rates_and_the_observer_hears_the_pioneer(lessons):
    said = [[extract_answer(d.answer, strict=True) for d in lesson] for _, lesson in lessons]
    readings = [
        {
            str(problem.answer),
            str(value_of(MISREADINGS.get(problem.family, right_formula(problem)).format(*problem.operands))),
        }
        for problem, _ in lessons
    ]
    astray = [index for index, (first, _) in enumerate(said) if first not in readings[index]]
    followed = sum(said[index][0] == said[index][1] for index in astray)
    # A number of the problem may happen to be its answer.
    assert WRONG_FIRST - 0.06 <= len(astray) / len(said) <= WRONG_FIRST + 0.03
    assert followed / len(astray) == pytest.approx(REPEATED, abs=0.12)
    assert all(second in {first} | known for (first, second), known in zip(said, readings, strict=True))
    for _, (pioneer, observer) in lessons:
        assert f"pioneer said:\n{pioneer.answer}" in observer.messages[-1]["content"]


def test_dialogues_fit_the_configured_lengths(lessons):
    check_lengths([d for _, lesson in lessons[:600] for d in lesson], 120, 16)


def test_another_workflow_is_refused():
    with pytest.raises(UserError, match="needs the rollout nodes pioneer, observer, not solve_left"):
        Teacher(load_workflow(ROOT / "workflows" / "workflow_debate.yaml"), 0)
