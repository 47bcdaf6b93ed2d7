"""The generated problems: answers, sizes, vocabulary, and the wall between train and test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from recipe.tiny.arithmetic import FAMILIES, MENTAL, generate, main, splits

ROOT = Path(__file__).parents[2]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_every_answer_is_the_value_of_its_expression(seed):
    for problem in generate(seed, 48):
        tree = ast.parse(problem.expression, mode="eval")
        operators = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
        assert eval(compile(tree, "expression", "eval"), {"__builtins__": {}}) == problem.answer
        assert 1 <= len(operators) <= 2
        assert 0 <= problem.answer <= 999
        assert all(2 <= operand <= 99 for operand in problem.operands)
        assert tuple(map(int, re.findall(r"\d+", problem.text))) == problem.operands
        assert len(problem.text.split()) < 15


def test_vocabulary_is_small():
    words = {word for problem in generate(0, 2048) for word in re.findall(r"[A-Za-z]+", problem.text)}
    assert len(words) < 150


def test_families_are_balanced_and_all_used():
    problems = generate(1, 10 * len(FAMILIES))
    assert {family.name: 10 for family in FAMILIES} == {
        family.name: sum(problem.family == family.name for problem in problems) for family in FAMILIES
    }


def test_a_seed_gives_the_same_problems_and_another_seed_others():
    assert generate(7, 100) == generate(7, 100)
    assert generate(7, 100) != generate(8, 100)


def test_train_and_test_share_neither_text_nor_family_with_numbers():
    train, test = splits(0, 2048, 64)
    assert (len(train), len(test)) == (2048, 64)
    assert len({problem.text for problem in train}) == 2048
    assert not {problem.text for problem in train} & {problem.text for problem in test}
    assert not {(p.family, p.operands) for p in train} & {(p.family, p.operands) for p in test}


def test_exclude_keeps_other_names_of_the_same_numbers_out():
    held = generate(5, 240)
    again = generate(5, 240, exclude=held)
    assert not {(p.family, p.operands) for p in again} & {(p.family, p.operands) for p in held}


def test_asking_for_more_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr("recipe.tiny.arithmetic.NAMES", ("Ann", "Bob", "Cara"))
    monkeypatch.setattr("recipe.tiny.arithmetic.THINGS", ("pens",))
    with pytest.raises(UserError, match="ask for fewer"):
        generate(0, 700, families=FAMILIES[3:4])


def test_mental_problems_have_one_operation_on_little_numbers(tmp_path):
    main(["--local_dir", str(tmp_path), "--mental", "--train_size", "2048"])
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert (len(train), len(test)) == (2048, 64)
    for row in train + test:
        a, operator, b = row["extra_info"]["expression"].split()
        assert operator in ("+", "-", "*", "//", "%") and {int(a), int(b)} <= set(range(2, 13))
        assert row["reward_model"]["ground_truth"] == str(eval(f"{a}{operator}{b}"))
    families = {row["extra_info"]["family"] for row in train}
    assert families == {row["extra_info"]["family"] for row in test} == {family.name for family in MENTAL}
    numbers = [{(r["extra_info"]["family"], r["extra_info"]["expression"]) for r in part} for part in (train, test)]
    assert not numbers[0] & numbers[1]
    assert len({row["extra_info"]["expression"] for row in test}) == 64


@pytest.mark.parametrize("option", ["--train_size=0", "--test_size=-1", "--seed=-1"])
def test_sizes_out_of_range_are_refused(option, tmp_path):
    with pytest.raises(UserError, match=option.split("=")[0]):
        main(["--local_dir", str(tmp_path / "out"), option])
    assert not (tmp_path / "out").exists()


def test_the_script_writes_its_problems_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "recipe" / "tiny" / "arithmetic.py"), "--local_dir", "out"]
    sizes = ["--train_size", "30", "--test_size", "12", "--seed", "4"]
    subprocess.run([*command, *sizes], cwd=tmp_path, check=True)
    for split, problems in zip(("train", "test"), splits(4, 30, 12), strict=True):
        rows = pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
        assert [row["prompt"][0]["content"] for row in rows] == [problem.text for problem in problems]
        assert [row["reward_model"]["ground_truth"] for row in rows] == [str(problem.answer) for problem in problems]
        assert rows[3]["extra_info"]["family"] == problems[3].family
        assert rows[3]["extra_info"]["expression"] == problems[3].expression
