"""The laptop's runs: what the teacher shows in one turn and in two, and that it fits the configured lengths."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import pytest

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.answer import extract_answer
from recipe.dag.settings.compose import compose_config
from recipe.dag.workflow.plan import make_plan
from recipe.retool_ma import teacher as rates
from recipe.retool_ma.plan import parse_plan
from recipe.retool_ma.snippet import extract_code
from recipe.retool_ma.teacher import Teacher
from recipe.retool_ma.verdict import parse_verdict
from recipe.tiny.careless import MISREADINGS, RIGHT_READING
from recipe.tiny.tokenizer import build_tokenizer
from tests.tiny.lengths import check_lengths

ROOT = Path(__file__).parents[2]
ONE_TURN, REVISE = ("workflow_retool_ma.yaml", "workflow_retool_ma_revise.yaml")


def lessons_of(file: str, count: int = 1000):
    teacher = Teacher(load_workflow(ROOT / "workflows" / file), 0)
    return [(problem, teacher.teach(problem)) for problem in teacher.problems(count, 64)]


@pytest.fixture(scope="module")
def lessons():
    return lessons_of(REVISE)


@pytest.fixture(scope="module")
def one_turn():
    return lessons_of(ONE_TURN)


def is_right(problem, plan: str) -> bool:
    return parse_plan(plan)[0]["code_plan"] == f"print({problem.expression.replace(' ', '')})"


def is_broken(lesson) -> bool:
    return not extract_code(lesson[1].answer).endswith(")")


def asks(lesson) -> bool:
    return "REVISE" in lesson[2].answer


def test_the_workflow_has_two_turns():
    workflow = load_workflow(ROOT / "workflows" / REVISE)
    assert make_plan(workflow).max_turns == 2
    assert {node.id: node.function for node in workflow.reward_nodes} == {
        node.id: node.function for node in load_workflow(ROOT / "workflows" / ONE_TURN).reward_nodes
    }


def test_where_there_is_one_turn_nothing_is_sent_back(one_turn):
    assert all([d.role for d in lesson] == ["plan", "execute", "verify"] for _, lesson in one_turn)
    assert not any(asks(lesson) for _, lesson in one_turn)
    for misread, rate in ((False, 1 - rates.SLIP), (True, RIGHT_READING * (1 - rates.SLIP))):
        right = [is_right(p, x[0].answer) for p, x in one_turn if (p.family in MISREADINGS) == misread]
        assert fmean(right) == pytest.approx(rate, abs=0.06) and len(right) > 400
    assert fmean(is_broken(lesson) for _, lesson in one_turn) == pytest.approx(rates.BROKEN_CODE, abs=0.02)


def test_a_review_that_asks_is_followed_by_a_second_turn_and_an_answer_by_none(lessons):
    for _, lesson in lessons:
        moves = [(d.role, d.turn) for d in lesson]
        turns = 1 + asks(lesson)
        assert moves == [(role, turn) for turn in range(turns) for role in ("plan", "execute", "verify")]
        assert not asks(lesson[-3:])


def test_the_teacher_is_careless_at_its_rates_and_less_so_in_the_second_turn(lessons):
    assert fmean(is_broken(x) for _, x in lessons) == pytest.approx(rates.BROKEN_CODE_OFTEN, abs=0.04)
    assert all(asks(x) for _, x in lessons if is_broken(x))
    reviewed = [(problem, x) for problem, x in lessons if not is_broken(x)]
    expected = [x[2].answer.split("\n")[0] for _, x in reviewed]
    wrong = fmean(formula != p.expression.replace(" ", "") for (p, _), formula in zip(reviewed, expected, strict=True))
    assert wrong == pytest.approx(rates.WRONG_REVIEW, abs=0.05)
    for (_, x), formula in zip(reviewed, expected, strict=True):
        assert asks(x) == (parse_plan(x[0].answer)[0]["code_plan"] != f"print({formula})")
    again = [(problem, lesson) for problem, lesson in lessons if len(lesson) == 6]
    assert fmean(not is_right(p, x[3].answer) for p, x in again) == pytest.approx(rates.WRONG_PLAN_AGAIN, abs=0.06)


def test_the_second_turn_answers_what_the_first_left(lessons):
    """The prompts are the hooks' own: plan, log and feedback of the first turn, and a review that must answer."""
    for problem, lesson in lessons:
        for d in lesson:
            assert problem.text in d.messages[-1]["content"]
        first, second = lesson[:3], lesson[3:]
        assert "REVISE" in first[2].messages[-1]["content"] and "Your last plan" not in first[0].messages[-1]["content"]
        if second:
            asked = second[0].messages[-1]["content"]
            plan = json.dumps(json.loads(first[0].answer))
            assert f"Your last plan:\n{plan}\n" in asked
            assert (
                f"Code:\n{extract_code(first[1].answer)}\nStatus:\n{'failed' if is_broken(first) else 'success'}"
                in asked
            )
            assert f"What has to change:\n{first[2].answer.partition('REVISE: ')[2]}\n" in asked
            assert json.dumps(json.loads(second[0].answer)) in second[1].messages[-1]["content"]
            assert extract_code(second[1].answer) in second[2].messages[-1]["content"]
            assert "REVISE" not in second[2].messages[-1]["content"]


def test_the_roles_read_every_answer(lessons):
    for _, lesson in lessons:
        for d in lesson:
            if d.role == "plan":
                assert parse_plan(d.answer)[1]
            elif d.role == "execute":
                assert extract_code(d.answer).startswith("print(")
            else:
                verdict = parse_verdict(d.answer, may_revise=d.turn == 0)
                assert verdict.kind == ("revise" if "REVISE" in d.answer else "final")
                assert verdict.feedback or extract_answer(d.answer) == verdict.answer


@pytest.mark.parametrize("file", [ONE_TURN, REVISE])
def test_dialogues_fit_the_configured_lengths(file, request):
    chosen = request.getfixturevalue("lessons" if file == REVISE else "one_turn")
    data = compose_config("tiny_cpu", ["workflow=w.yaml"], ROOT / "recipe" / "retool_ma" / "config").data
    check_lengths([d for _, lesson in chosen for d in lesson], data.max_prompt_length, data.max_response_length)


def test_the_instructions_of_both_turns_are_single_tokens(lessons):
    """So that a model of a million parameters need not read them letter by letter."""
    demonstrations = [d for _, lesson in lessons for d in lesson]
    tokenizer = build_tokenizer(demonstrations)
    for turn in (0, 1):
        plan = next(d for d in demonstrations if (d.role, d.turn) == ("plan", turn))
        opening, problem, _ = plan.messages[-1]["content"].partition("\n\nProblem:\n")
        assert len(opening) > 60 and len(tokenizer.encode(opening + problem)) == 1
        review = next(d for d in demonstrations if (d.role, d.turn) == ("verify", turn)).messages[-1]["content"]
        assert len(tokenizer.encode(review[review.index("Stderr:\n[none]") :])) < 12


def test_the_log_that_is_planned_from_again_is_the_sandboxs(lessons):
    """A dialogue after a failure would otherwise be one that the model has never seen."""
    log = next(x[3].messages[-1]["content"] for _, x in lessons if is_broken(x))
    code = log.partition("Code:\n")[2].partition("\nStatus:")[0]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "tmp_program.py"
        program.write_text(code)
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    error = done.stderr.strip("\n").replace(folder, "/tmp/tmp_sandbox")
    assert done.returncode and f"Stderr:\n{error}\n" in log
