from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.train.ground_truth import after_hashes, ground_truths

GSM8K = ["48/2 = 24\n48+24 = 72\n#### 72", "#### 1,234,567", "x\n####  -3.5 \n"]
MATH = [r"So $x=\boxed{\frac{1}{2}}$.", r"First \boxed{1}, then \boxed{(2, 3)}"]


@pytest.mark.parametrize(
    ("answers", "truths"),
    [
        (GSM8K, ["72", "1234567", "-3.5"]),
        (MATH, [r"\frac{1}{2}", "(2, 3)"]),
        (["72", "x + 1"], ["72", "x + 1"]),
        ([*GSM8K, "72"], [*GSM8K, "72"]),
        (["#5", "a #### b"], ["#5", "a #### b"]),
    ],
)
def test_auto_takes_the_format_that_every_row_has(answers, truths):
    assert ground_truths(answers, "set") == truths


@pytest.mark.parametrize("name", ["hashes", "boxed"])
def test_a_row_without_the_format_asked_for_is_named(name):
    answers = {"hashes": GSM8K, "boxed": MATH}[name]
    with pytest.raises(UserError, match=f"set: row {len(answers) + 1} has no answer in the format {name}: 'about 7'"):
        ground_truths([*answers, "about\n7"], "set", name)


def test_text_leaves_answers_as_they_are():
    assert ground_truths([*GSM8K, *MATH], "set", "text") == [*GSM8K, *MATH]


def test_an_unknown_format_is_refused():
    with pytest.raises(UserError, match="data.answer_format=hash is unknown; choose auto, hashes, boxed, text"):
        ground_truths(["1"], "set", "hash")


def test_commas_that_are_no_thousands_separators_stay():
    assert after_hashes("#### 1,2") == "1,2" and after_hashes("#### (1,234)") == "(1234)"
