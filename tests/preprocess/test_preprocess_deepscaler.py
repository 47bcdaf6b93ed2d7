"""DeepScaleR to parquet: the schema, the split, what is left out, and what is said of bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.dag.core.errors import UserError
from verl_dag.preprocess import deepscaler
from verl_dag.preprocess.deepscaler import HUB_NAME, INSTRUCTION

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    {"problem": rf"What is $\frac{{{n}}}{{2}}$?", "answer": rf"\frac{{{n}}}{{2}}", "solution": f"It is {n}/2."}
    for n in range(12)
]
BAD = [
    {"problem": " ", "answer": "1", "solution": ""},
    {"problem": None, "answer": "1", "solution": ""},
    {"answer": "1"},
    {"problem": "p", "answer": None, "solution": "s"},
    {"problem": "q", "answer": "", "solution": "s"},
    {"problem": "r", "answer": ["1"], "solution": "s"},
    {"problem": "WHAT is  $\\frac{3}{2}$?", "answer": "\\frac{3}{2}", "solution": ""},
    {"problem": "what is $\\frac{4}{2}$?", "answer": "2", "solution": ""},
]


def convert(tmp_path: Path, rows: list, *options: str, name: str = "in.json") -> tuple[list[dict], list[dict]]:
    source, out = tmp_path / name, tmp_path / "out"
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        source.write_text(json.dumps(rows) if name == "in.json" else "".join(json.dumps(row) + "\n" for row in rows))
    deepscaler.main(["--input", str(source), "--local_dir", str(out), *options])
    parts = (out / f"{split}.parquet" for split in ("train", "test"))
    return tuple(pq.read_table(part).to_pylist() if part.exists() else [] for part in parts)


@pytest.mark.parametrize("name", ["in.json", "in.jsonl", "in.parquet"])
def test_rows_have_verls_schema(tmp_path, name):
    train, test = convert(tmp_path, ROWS, "--test_size", "3", name=name)
    assert (len(train), len(test)) == (9, 3)
    assert sorted(os.listdir(tmp_path / "out")) == ["test.parquet", "train.parquet"]
    row = test[1]
    number = int(row["extra_info"]["solution"].removeprefix("It is ").removesuffix("/2."))
    assert row == {
        "data_source": "deepscaler",
        "prompt": [{"role": "user", "content": ROWS[number]["problem"] + INSTRUCTION}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ROWS[number]["answer"]},
        "extra_info": {"index": 1, "split": "test", "solution": ROWS[number]["solution"]},
    }
    assert "\\boxed{}" in INSTRUCTION


def test_the_seed_chooses_the_split_and_no_problem_is_in_both(tmp_path):
    def split(*options: str) -> tuple[list[str], list[str]]:
        parts = convert(tmp_path, ROWS, "--test_size", "4", *options)
        return tuple([row["prompt"][0]["content"] for row in part] for part in parts)

    train, test = split()
    assert (train, test) == split("--seed", "0") != split("--seed", "1")
    assert not set(train) & set(test) and len(train) + len(test) == len(ROWS)


def test_bad_rows_are_left_out_and_counted(tmp_path, capsys):
    train, test = convert(tmp_path, ROWS + BAD, "--test_size", "2")
    assert len(train) + len(test) == len(ROWS)
    assert capsys.readouterr().out.splitlines()[:4] == [
        "left out 1 row with a repeated problem",
        "left out 1 row with a repeated problem and another answer",
        "left out 3 rows without a problem",
        "left out 3 rows without an answer",
    ]


def test_a_missing_solution_is_fine(tmp_path):
    rows = [{"problem": f"p{n}", "answer": n} for n in range(3)]
    train, test = convert(tmp_path, rows, "--test_size", "1", "--instruction", " Box it.")
    assert all(row["prompt"][0]["content"].endswith(" Box it.") for row in train + test)
    assert {row["extra_info"]["solution"] for row in train + test} == {""}


@pytest.mark.parametrize(
    ("answers", "truths", "name"),
    [
        ([0, 1, 2], ["0", "1", "2"], "in.json"),
        ([1.5, -0.25, 1e-7, 1e22, 2.0], ["1.5", "-0.25", "0.0000001", "10000000000000000000000", "2.0"], "in.jsonl"),
        ([float("nan"), 1.5, float("inf"), True, 3], ["1.5", "3"], "in.jsonl"),
        ([0.5, 1.0], ["0.5", "1.0"], "in.parquet"),
        ([Decimal("1.50"), Decimal("2.25")], ["1.50", "2.25"], "in.parquet"),
        (["1.5", " 3/2 "], ["1.5", "3/2"], "in.json"),
    ],
)
def test_numbers_are_answers(answers, truths, name, tmp_path):
    """As a person writes them: no exponent, nothing rounded; what is not finite is none."""
    rows = [{"problem": f"p{n}", "answer": answer} for n, answer in enumerate(answers)]
    _, test = convert(tmp_path, rows, "--test_size", "all", name=name)
    assert [row["reward_model"]["ground_truth"] for row in test] == truths


def test_all_rows_may_be_held_out(tmp_path, capsys):
    train, test = convert(tmp_path, ROWS, "--test_size", "all")
    assert (train, len(test)) == ([], len(ROWS)) and "train: 0 rows, not written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (BAD[:6], [], "no row has text"),
        ([{"question": "p", "answer": "1"}], [], "no row has text"),
        (ROWS, ["--test_size", "12"], "leave none to train on"),
        (ROWS, ["--test_size", "0"], "--test_size 0: must be 1"),
        (ROWS, ["--max_samples", "-1"], "--max_samples -1: must be 1"),
        (ROWS, ["--input", "none.json"], "no such file"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, rows, options, message):
    with pytest.raises(UserError, match=message) as error:
        convert(tmp_path, rows, *options)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_the_hubs_data_set_is_the_default(tmp_path, hub):
    asked = hub(lambda path, name, split: ROWS)
    deepscaler.main(["--local_dir", str(tmp_path), "--test_size", "2"])
    assert asked == [(HUB_NAME, None, "train")] and (tmp_path / "train.parquet").is_file()


def test_the_script_runs_by_itself_from_anywhere(tmp_path):
    (tmp_path / "in.json").write_text(json.dumps(ROWS))
    command = [sys.executable, str(ROOT / "preprocess/deepscaler.py"), "--input", "in.json", "--local_dir", "out"]
    done = subprocess.run([*command, "--test_size", "20"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    done = subprocess.run([*command, "--test_size", "2"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "train: 10 rows" in done.stdout
