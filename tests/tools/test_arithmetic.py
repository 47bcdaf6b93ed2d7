"""The calculator's arithmetic: right where it has a value, one sentence where it has none, and never slow."""

from __future__ import annotations

import asyncio
import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.tools.arithmetic import FUNCTIONS, MAX_BITS, MAX_CHARS, CalculationError, evaluate, show
from recipe.dag.tools.calculator import Calculator


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2*(3+4)^2", "98"),
        ("2 ** 3 ** 2", "512"),
        ("-2^2", "-4"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 = 0.333333333333 (rounded)"),
        ("7/8", "0.875"),
        ("6×7 − 4÷2", "40"),
        ("17 % 5", "2"),
        ("-7 // 2", "-4"),
        ("sqrt(16/9)", "4/3 = 1.33333333333 (rounded)"),
        ("9^(1/2)", "3"),
        ("sqrt(2)", "1.41421356237"),
        ("sin(pi/6)", "0.5"),
        ("log(8, 2)", "3"),
        ("ln(e)", "1"),
        ("log10(10^1000)", "1000"),
        ("comb(10, 3) + factorial(5)", "240"),
        ("gcd(12, 18) * lcm(4, 6)", "72"),
        ("sum([1, 2, 3.5]) + mean(1, 2)", "8"),
        ("max(1, 2/3, 1.5)", "1.5"),
        ("round(2.567, 2)", "2.57"),
        ("floor(-2.5) + ceil(2.1)", "0"),
        ("1_000 * 1e3", "1000000"),
        ("1^(10^1000)", "1"),
        ("(-1)^(10^1000 + 1)", "-1"),
    ],
)
def test_the_value_of_an_expression(text, shown):
    assert show(evaluate(text)) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("x = 3", "no equations or variables"),
        ("2x + 1", "`2x` is not a number; write * between factors"),
        ("0x10", "is not a number"),
        ("5!", "only arithmetic is allowed, not `!`"),
        ("2 ½", "only arithmetic is allowed, not `½`"),
        ("y + 1", "there is no number `y`"),
        ("15%", "write 15/100"),
        ("1,234 + 1", "write 1234, not 1,234"),
        ("1/0", "division by zero"),
        ("0^-1", "division by zero"),
        ("5 % 0", "division by zero"),
        ("log(0)", "log(0) is not a real number"),
        ("(-8)^(1/3)", "is not real"),
        ("9**9**9**9", "too large"),
        ("1e999999999", "too large"),
        ("0.5^1000000", "too large"),
        ("exp(1000)", "too large"),
        ("factorial(501)", "up to 500"),
        ("factorial(2.5)", "whole numbers"),
        ("comb(3, -1)", "non-negative"),
        ("round(1/3, 10^9)", "up to 100"),
        ("abs(1, 2)", "argument"),
        ("__import__(1)", "there is no function `__import__`"),
        ("(1).__class__", "only arithmetic is allowed"),
        ("[1, 2][0]", "only arithmetic is allowed"),
        ("'a' * 3", "only arithmetic is allowed, not `'`"),
        ("True + 1", "only numbers are allowed"),
        ("1j", "is not a number"),
        ("lambda: 1", "only arithmetic is allowed"),
        ("(" * 200 + "1" + ")" * 200, "nested too deeply"),
        ("-" * 900 + "1", "nested too deeply"),
        ("2 == 2", "only arithmetic is allowed, not `2 == 2`"),
        ("1" * (MAX_CHARS + 1), f"at most {MAX_CHARS}"),
    ],
)
def test_what_has_no_value_says_why(text, message):
    with pytest.raises(CalculationError) as error:
        evaluate(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_chains_as_long_as_the_text_may_be_are_computed():
    assert evaluate("+".join(["1"] * 500)) == 500
    assert evaluate("**".join(["1"] * 300)) == 1


numbers = st.one_of(st.integers(0, 10**6).map(str), st.decimals(0, 1000, places=3).map(str))
exact = st.recursive(
    numbers,
    lambda inner: st.builds(lambda a, op, b: f"({a} {op} {b})", inner, st.sampled_from("+-*/"), inner),
    max_leaves=12,
)


@given(exact)
def test_the_four_operations_are_exact(text):
    def value(part: str) -> Fraction:
        return eval(part, {}, {"F": Fraction})

    wrapped = re.sub(r"\d+(?:\.\d+)?", lambda match: f"F('{match[0]}')", text)
    try:
        expected = value(wrapped)
    except ZeroDivisionError:
        with pytest.raises(CalculationError, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == expected


pieces = st.sampled_from(
    ["9" * 300, "1e999", "**", "^", "(", ")", "[", "]", "-", "~", "+", "*", "/", "//", "%", ",", ".", "0", "0.5", "2"]
    + ["!", "=", "'", '"', "\\", "\0", "\n", "\ud800", "lambda", "if", "for", "…", "½", "²", "f(", "x", "_", "1_", "e"]
    + [f"{name}(" for name in FUNCTIONS]
)


@pytest.mark.filterwarnings("error")
@given(st.one_of(st.text(max_size=200), st.lists(pieces, max_size=60).map("".join)))
def test_any_text_has_a_bounded_value_or_a_reason(text):
    try:
        value = evaluate(text)
    except CalculationError:
        return
    shown = show(value)
    assert len(shown) < 2 * MAX_BITS and shown.isascii()
    if isinstance(value, float):
        assert math.isfinite(value)
    else:
        assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ({"expression": "22/7"}, "success", "22/7 = 3.143 (rounded)"),
        ({"expression": "import os"}, "failed", "Error: this is not one arithmetic expression"),
        ({"expression": 3}, "invalid", "expression must be a text"),
    ],
)
def test_every_call_of_the_tool_has_a_result(arguments, status, text):
    result = asyncio.run(Calculator(digits=4).execute(arguments, {}))
    assert result.status == status and result.text.startswith(text)
