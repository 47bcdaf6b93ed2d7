"""Value tables of the role rewards, in both semantics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from recipe.retool_ma.rewards import (
    Coefficients,
    coefficients,
    executor_reward,
    numbers_match,
    overlap,
    planner_reward,
    spec_matches,
    verifier_reward,
)

PAPER, COMPAT = Coefficients(), Coefficients(compat=True)


def test_defaults_are_the_published_eight():
    assert PAPER.model_dump() == {
        "planner_success_bonus": 0.4,
        "planner_failure_penalty": 0.2,
        "planner_spec_bonus": 0.4,
        "executor_success_bonus": 0.6,
        "executor_failure_penalty": 0.4,
        "executor_alignment_bonus": 0.4,
        "verifier_missed_penalty": 0.5,
        "verifier_reject_penalty": 0.3,
        "reward_min": -1.0,
        "reward_max": 1.0,
        "compat": False,
    }


@pytest.mark.parametrize(
    ("success", "expected", "stdout", "compat", "paper"),
    [
        (True, "42", "42\n", 0.8, 0.8),
        (True, "  The  ANSWER\nis 42", "the answer is 42", 0.8, 0.8),
        (True, "\\boxed42", "42", 0.8, 0.8),
        (True, "\\boxed{42}", "42", 0.4, 0.8),
        (True, "42.0", "42", 0.4, 0.8),
        (True, "1/2", "0.5", 0.4, 0.8),
        (True, "the number 42", "42", 0.4, 0.8),
        (True, "41", "42", 0.4, 0.4),
        (True, "a number", "42", 0.4, 0.4),
        (True, "", "42", 0.4, 0.4),
        (True, "", "", 0.4, 0.4),
        (True, "42", "", 0.4, 0.4),
        (False, "42", "42", -0.2, -0.2),
        (False, "", "", -0.2, -0.2),
    ],
)
def test_planner(success, expected, stdout, compat, paper):
    assert planner_reward(COMPAT, success=success, expected=expected, stdout=stdout) == pytest.approx(compat)
    assert planner_reward(PAPER, success=success, expected=expected, stdout=stdout) == pytest.approx(paper)


@pytest.mark.parametrize(
    ("success", "code_plan", "code", "reward"),
    [
        (True, "loop over numbers", "for n in numbers: pass", 0.6 + 0.4 / 3),
        (True, "numbers", "NUMBERS = 1", 1.0),
        (True, "sympy solve", "x = 1", 0.6),
        (True, "", "print(1)", 0.6),
        (False, "numbers", "numbers", 0.0),
        (False, "numbers other", "numbers", -0.2),
        (False, "", "", -0.4),
    ],
)
def test_executor(success, code_plan, code, reward):
    for c in (PAPER, COMPAT):
        assert executor_reward(c, success=success, code_plan=code_plan, code=code) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("code_plan", "code", "share"),
    [
        ("", "anything", 0.0),
        ("use 1 2 + x if it", "use if it", 0.0),
        ("Please therefore problem output", "please therefore problem output", 0.0),
        ("Print the OUTPUT", "print(1)", 1.0),
        ("print print print sympy", "print(1)", 0.5),
        ("is_prime list", "def is_prime(n): ...", 0.5),
        ("rang", "for i in range(3)", 1.0),
        ("abcd1efgh", "abcd", 0.5),
        ("naïve sums", "sums", 1.0),
    ],
)
def test_overlap(code_plan, code, share):
    assert overlap(code_plan, code) == share


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        ("42", "42.0", True),
        ("1/2", "0.5", True),
        ("\\boxed{7}", "x = 7", True),
        ("7 then 8", "7", True),
        ("7 then 8", "8", False),
        ("1000000", "1000001", True),
        ("1000", "1001", False),
        ("-3", "3", False),
        ("", "3", None),
        ("none", "3", None),
        ("1/0", "3", None),
        ("9" * 400, "8" * 500, None),
    ],
)
def test_numbers_match(a, b, match):
    assert numbers_match(a, b) is match
    assert numbers_match(b, a) is match


VERIFIER = [
    # outcome, success, stdout, answer, compat, paper; the truth is 42
    (1, True, "42", "42", 1.0, 1.0),
    (1, True, "hello", "42", 1.0, 1.0),
    (1, True, "", "42", 1.0, 1.0),
    (1, True, "41", "42", 0.5, 1.0),
    (1, False, "41", "42", 1.0, 1.0),
    (0, True, "42", "41", -0.3, -0.3),
    (0, True, "42", None, -0.3, -0.3),
    (0, True, "41", "41", -0.5, -0.5),
    (0, True, "41", "40", -0.5, 0.0),
    (0, True, "41", None, -0.5, 0.0),
    (0, True, "42", "42 apples", -0.3, -0.5),
    (0, True, "hello", "41", 0.0, 0.0),
    (0, True, "", None, 0.0, 0.0),
    (0, False, "42", "41", 0.0, 0.0),
    (0, False, "41", "41", 0.0, 0.0),
    (-1, True, "42", "41", -1.0, -1.0),
    (-1, True, "41", "41", -1.0, -1.0),
    (-1, False, "", "41", -1.0, -1.0),
]


@pytest.mark.parametrize(("outcome", "success", "stdout", "answer", "compat", "paper"), VERIFIER)
def test_verifier(outcome, success, stdout, answer, compat, paper):
    case = {"outcome": outcome, "success": success, "stdout": stdout, "answer": answer, "truth": "42"}
    assert verifier_reward(COMPAT, **case) == pytest.approx(compat)
    assert verifier_reward(PAPER, **case) == pytest.approx(paper)


def test_verifier_that_accepts_a_wrong_output_is_penalised_where_the_truth_has_no_number():
    case = {"outcome": 0, "success": True, "stdout": "3", "answer": "3", "truth": "\\pi"}
    assert verifier_reward(PAPER, **case) == -0.5
    assert verifier_reward(COMPAT, **case) == 0.0


@given(st.booleans(), st.text(), st.text(), st.text(), st.text(), st.sampled_from([-1.0, 0.0, 1.0]), st.booleans())
def test_every_reward_is_bounded(success, plan, code, stdout, truth, outcome, compat):
    c = Coefficients(compat=compat)
    assert planner_reward(c, success=success, expected=plan, stdout=stdout) in (-0.2, 0.4, 0.8)
    assert 0.0 <= overlap(plan, code) <= 1.0
    low, high = (0.6, 1.0) if success else (-0.4, 0.0)
    assert low <= executor_reward(c, success=success, code_plan=plan, code=code) <= high
    reward = verifier_reward(c, outcome=outcome, success=success, stdout=stdout, answer=code, truth=truth)
    assert -1.0 <= reward <= outcome


def test_rewards_are_clamped_to_the_given_bounds():
    c = coefficients({"reward_min": -0.1, "reward_max": 0.5, "planner_success_bonus": 9})
    assert planner_reward(c, success=True, expected="", stdout="") == 0.5
    assert planner_reward(c, success=False, expected="", stdout="") == -0.1


def test_spec_matches_needs_an_expectation():
    assert not spec_matches(" \\boxed ", "\\boxed", compat=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planer_success_bonus": 1}, "planer_success_bonus: unknown; the options are planner_success_bonus"),
        ({"planner_failure_penalty": -0.2}, "planner_failure_penalty: "),
        ({"reward_max": float("nan")}, "reward_max: "),
        ({"verifier_missed_penalty": "much"}, "verifier_missed_penalty: "),
        ({"reward_min": 2}, "reward_min 2.0 is above reward_max 1.0"),
    ],
)
def test_wrong_coefficients_are_named(options, message):
    with pytest.raises(UserError) as error:
        coefficients(options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
