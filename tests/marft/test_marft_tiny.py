"""The laptop's run: the teacher, the model's builder on a CPU, and what two recipes' builders share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from recipe.dag.loading.workflow_file import load_workflow
from recipe.marft.teacher import SLIP, WRONG_ANSWER, Teacher
from recipe.tiny.build import main
from recipe.tiny.careless import MISREADINGS, RIGHT_READING, right_formula
from tests.tiny.lengths import check_lengths

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "workflows" / "workflow_marft_tiny.yaml"


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(load_workflow(WORKFLOW), 0)


def test_the_teacher_is_careless_at_its_rates(teacher):
    lessons = [(problem, teacher.teach(problem)) for problem in teacher.problems(1500, 64)]
    right: dict[bool, list[bool]] = {False: [], True: []}
    followed = 0
    for problem, (reasoner, actor) in lessons:
        right[problem.family in MISREADINGS].append(reasoner.answer == right_formula(problem))
        followed += actor.answer == f"\\boxed{{{eval(reasoner.answer)}}}"
        asked = [lesson.messages[-1]["content"] for lesson in (reasoner, actor)]
        assert problem.text in asked[0] and problem.text not in asked[1] and reasoner.answer in asked[1]
    assert sum(right[False]) / len(right[False]) == pytest.approx(1 - SLIP, abs=0.05)
    assert sum(right[True]) / len(right[True]) == pytest.approx(RIGHT_READING * (1 - SLIP), abs=0.05)
    assert followed / 1500 == pytest.approx(1 - WRONG_ANSWER, abs=0.05)


def test_no_test_problem_is_taught(teacher):
    from recipe.tiny.arithmetic import splits

    taught = {(p.family, p.operands) for p in teacher.problems(2048, 64)}
    assert not taught & {(p.family, p.operands) for p in splits(0, 2048, 64, mental=True)[1]}


def test_dialogues_fit_the_configured_lengths(teacher):
    lessons = [lesson for problem in teacher.problems(600, 64) for lesson in teacher.teach(problem)]
    check_lengths(lessons, 64, 16)


def test_another_workflow_is_refused(capsys, tmp_path):
    other = ROOT / "workflows" / "workflow_no_tool.yaml"
    arguments = ["--workflow", str(other), "--teacher", f"{ROOT}/recipe/marft/teacher.py:Teacher"]
    assert main([*arguments, "--output", str(tmp_path / "model")]) == 2
    assert "two rollout nodes (reasoner, actor), not 1" in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_the_model_is_built_once_and_rebuilt_when_prompts_change(tmp_path, capsys):
    workflow = tmp_path / "workflow.yaml"
    workflow.write_text(WORKFLOW.read_text())
    arguments = ["--workflow", str(workflow), "--teacher", "recipe/marft/teacher.py:Teacher", "--steps", "2"]
    arguments += ["--problems", "300", "--output", str(tmp_path / "model")]
    assert main(arguments) == 0
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["model", "workflow.yaml"]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen2"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode(r"\boxed{12}")) == r"\boxed{12}"
    capsys.readouterr()
    assert main(arguments) == 0 and "already exists" in capsys.readouterr().out
    workflow.write_text(WORKFLOW.read_text().replace("A colleague's steps", "The steps of a colleague"))
    assert main(arguments) == 0 and "have changed; making the model again" in capsys.readouterr().out
    assert main(arguments) == 0 and "already exists" in capsys.readouterr().out
