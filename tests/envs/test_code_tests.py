"""Tests of programming data sets: the forms that are read, and what counts as a right result."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from verl_dag.envs.code_tests import Case, cases_of, passed, program_for, same, same_output

FORMS = [
    ({"inputs": ["1\n", "2"], "outputs": ["1", "4"]}, [Case("stdio", "1\n", "1"), Case("stdio", "2", "4")]),
    ({"inputs": [["3", "4"]], "outputs": [["7", 0]]}, [Case("stdio", "3\n4", "7\n0")]),
    ({"inputs": [[1, [2]]], "outputs": [3], "fn_name": "f"}, [Case("call", [1, [2]], 3, "f")]),
    ({"inputs": ['[1, 2]\n"a"'], "outputs": ["[3]"], "fn_name": "f"}, [Case("call", [[1, 2], "a"], [3], "f")]),
    ({"inputs": ["1"], "outputs": ["1"], "fn_name": None}, [Case("stdio", "1", "1")]),
    ([{"input": "1", "output": "2"}], [Case("stdio", "1", "2")]),
    ([{"input": [1], "output": 2, "fn_name": "f"}], [Case("call", [1], 2, "f")]),
    ({"test_list": ["assert f(1) == 1"]}, [Case("assert", "assert f(1) == 1")]),
    ({"test_list": ["assert f()"], "test_setup_code": "import math"}, [Case("assert", "import math\nassert f()")]),
    ({"assert_case": ["assert f(0)", "assert f(1)"]}, [Case("assert", "assert f(0)"), Case("assert", "assert f(1)")]),
    (["assert f(2) == 2"], [Case("assert", "assert f(2) == 2")]),
]


@pytest.mark.parametrize(("truth", "cases"), FORMS)
def test_forms_are_read_as_data_and_as_json(truth, cases):
    assert cases_of(truth) == cases_of(json.dumps(truth)) == cases


def test_a_bare_assert_is_a_test():
    assert cases_of("assert f(1) == 1") == [Case("assert", "assert f(1) == 1")]


@pytest.mark.parametrize(
    "truth",
    [None, "", "42", "no tests", 3, [], {}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, [1]],
)
def test_what_holds_no_tests_is_the_users_mistake(truth):
    with pytest.raises(UserError, match="CodeEnv: ") as error:
        cases_of(truth)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected", "equal"),
    [
        ("1 2\n", "1 2", True),
        ("1  2 \n\n", "1 2\n", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333334", True),
        ("0.333", "0.3333", False),
        ("1e3", "1000.0", True),
        ("1000001", "1000000", False),
        ("nan", "nan", True),
        ("x1.0", "x1", False),
        ("", "", True),
        ("1", "", False),
    ],
)
def test_output_is_compared_line_by_line(text, expected, equal):
    assert same_output(text, expected) is equal


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_values_equal_themselves_and_no_longer_list(value):
    assert same(value, value)
    assert not same([value], [value, value])


def test_a_program_that_reads_input_is_run_as_it_is():
    assert program_for("print(input())", Case("stdio", "x\n", "x"), "m") == ("print(input())", "x\n")


def test_the_expected_value_does_not_travel():
    program, stdin = program_for("def f(x): return x", Case("call", [1], "hidden", "f"), "m")
    assert "hidden" not in program + stdin


@pytest.mark.parametrize(
    ("case", "stdout", "right"),
    [
        (Case("call", [], 3, "f"), "noise\nm3\n", True),
        (Case("call", [], [3], "f"), "\nm3\n", True),
        (Case("call", [], 3, "f"), "\nm4\n", False),
        (Case("call", [], 3, "f"), "3\n", False),
        (Case("call", [], 3, "f"), "\nm3\nwritten at exit", True),
        (Case("call", [], 3, "f"), "\nmno JSON\n", False),
        (Case("call", [], 3, "f"), "\nm" + "9" * 5000 + "\n", False),
        (Case("call", [], 0.5, "f"), "\nm" + "9" * 400 + "\n", False),
        (Case("call", [], 3, "f"), "\nm" + "[" * 100_000 + "\n", False),
        (Case("call", [], 0.1, "f"), "\nm0.10000000001\n", True),
        (Case("assert", "assert f()"), "\nmtrue\n", True),
        (Case("assert", "assert f()"), "", False),
    ],
)
def test_results_behind_the_marker(case, stdout, right):
    assert passed(case, stdout, "m") is right
