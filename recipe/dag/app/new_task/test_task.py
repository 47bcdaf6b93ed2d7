"""Tests of the task. Run them with: .venv/bin/python -m pytest @folder@"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from recipe.dag.loading.workflow_file import load_workflow

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from agents import score  # noqa: E402
from teacher import Teacher  # noqa: E402


def test_the_workflow_is_valid():
    workflow = load_workflow(HERE / "workflow.yaml")
    assert [agent.name for agent in workflow.agents] == ["solver", "checker"]


def test_the_checker_sees_the_solvers_answer():
    teacher = Teacher(load_workflow(HERE / "workflow.yaml"), seed=0)
    (problem,) = teacher.problems(1, 0)
    solve, check = teacher.teach(problem)
    assert problem.text in solve.messages[-1]["content"]
    assert f"The solver says {solve.answer}." in check.messages[-1]["content"]


def test_the_solver_also_earns_for_a_right_checker():
    calls = [
        SimpleNamespace(agent="solver", parsed={"answer": "3"}),
        SimpleNamespace(agent="checker", parsed={"answer": "7"}),
    ]
    episode = SimpleNamespace(sample={"ground_truth": "7"}, calls=calls, outcome=None)
    assert score(episode) == {"solver": 0.5, "checker": 1.0} and episode.outcome == 1.0
