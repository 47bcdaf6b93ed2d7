"""Benchmark files to parquet: what is read, how it is split, and what is said of bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from tests.preprocess.conftest import read
from verl_dag.preprocess import aime, amc, math500

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"problem": rf"What is $\frac{{{n}}}{{1}}$?", "answer": f"{n}.0", "url": "x"} for n in range(8)]


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def convert(module, tmp_path, text: str, *options: str, name: str = "in.json") -> Path:
    source = tmp_path / name
    source.write_text(text, encoding="utf-8")
    module.main(["--input", str(source), "--local_dir", str(tmp_path / "out"), *options])
    return tmp_path / "out"


def test_rows_have_verls_schema(tmp_path, capsys):
    out = convert(amc, tmp_path, lines(ROWS), "--test_size", "2", "--add_prompt_suffix", " Box {it}.", name="in.jsonl")
    train, test = read(out / "train.parquet"), read(out / "test.parquet")
    assert capsys.readouterr().out.splitlines() == [
        f"train: 6 rows -> {out / 'train.parquet'}",
        f"test: 2 rows -> {out / 'test.parquet'}",
    ]
    assert sorted(os.listdir(out)) == ["test.parquet", "train.parquet"]
    assert sorted(row["reward_model"]["ground_truth"] for row in train + test) == list("01234567")
    answer = test[1]["reward_model"]["ground_truth"]
    assert test[1] == {
        "data_source": "amc",
        "prompt": [{"role": "user", "content": rf"What is $\frac{{{answer}}}{{1}}$? Box {{it}}."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 1, "split": "test"},
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("in.json", json.dumps(ROWS)),
        ("in.jsonl", json.dumps(ROWS, indent=2)),
        ("in.json", lines(ROWS)),
        ("in.txt", "\ufeff\n" + lines(ROWS) + "\n\n"),
        ("in.jsonl", lines(ROWS).replace("\n", "\r\n")),
    ],
)
def test_a_list_and_lines_are_read_whatever_the_suffix(tmp_path, name, text):
    out = convert(amc, tmp_path, text, "--test_size", "all", name=name)
    assert len(read(out / "test.parquet")) == 8
    assert not (out / "train.parquet").exists()


def test_a_line_separator_inside_a_string_does_not_cut_the_row(tmp_path):
    rows = [{"problem": "a\u2028b", "answer": "1"}]
    out = convert(amc, tmp_path, json.dumps(rows[0], ensure_ascii=False), "--test_size", "all")
    assert read(out / "test.parquet")[0]["prompt"][0]["content"] == "a\u2028b"


def test_parquet_is_read(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    options = ["--input", str(tmp_path / "in.parquet"), "--local_dir", str(tmp_path / "out")]
    amc.main(options)
    assert len(read(tmp_path / "out" / "train.parquet")) == 6


def test_a_quarter_is_held_out_and_the_seed_chooses_it(tmp_path):
    def held(seed: str) -> list[str]:
        out = convert(amc, tmp_path, lines(ROWS), "--seed", seed)
        assert len(read(out / "train.parquet")) == 6
        return [row["prompt"][0]["content"] for row in read(out / "test.parquet")]

    assert held("0") == held("0")
    assert len({tuple(held(str(seed))) for seed in range(5)}) > 1


def test_keys_max_samples_and_plain_numbers(tmp_path):
    rows = [{"q": "a", "a": 3}, {"q": "b", "a": 2.5}, {"q": "c", "a": "\\pi"}]
    options = ("--input_key", "q", "--label_key", "a", "--max_samples", "2", "--test_size", "all")
    out = convert(math500, tmp_path, lines(rows), *options)
    assert [row["reward_model"]["ground_truth"] for row in read(out / "test.parquet")] == ["3", "2.5"]


def test_training_problems_that_are_test_problems_are_left_out(tmp_path, capsys):
    (tmp_path / "test.jsonl").write_text(lines([{"prompt": "  What IS\n$\\frac{3}{1}$?", "answer": "003"}]))
    out = convert(aime, tmp_path, lines(ROWS), "--test_input", str(tmp_path / "test.jsonl"))
    assert len(read(out / "train.parquet")) == 7
    assert read(out / "test.parquet")[0]["reward_model"]["ground_truth"] == "3"
    assert "left out 1 row" in capsys.readouterr().out


def test_aime_years(tmp_path):
    rows = [{"prompt": f"p{year}", "answer": "025", "year": year} for year in (2021, 2022, 2023, 2024)]
    out = convert(aime, tmp_path, json.dumps(rows), "--max_year", "2023", "--test_size", "1")
    both = read(out / "train.parquet") + read(out / "test.parquet")
    assert sorted(row["prompt"][0]["content"] for row in both) == ["p2021", "p2022", "p2023"]
    with pytest.raises(UserError, match="year"):
        convert(aime, tmp_path, lines(ROWS), "--max_year", "2023")


@pytest.mark.parametrize(
    ("clean", "answer", "expected"),
    [
        (amc.clean_answer, "27.0", "27"),
        (amc.clean_answer, "-1.0", "-1"),
        (amc.clean_answer, "2.50", "2.50"),
        (amc.clean_answer, "\\frac{1}{2}", "\\frac{1}{2}"),
        (aime.clean_answer, "025", "25"),
        (aime.clean_answer, "000", "0"),
        (aime.clean_answer, "336^\\circ", "336^\\circ"),
        (aime.clean_answer, "080 or 081 (both were accepted)", "080 or 081 (both were accepted)"),
    ],
)
def test_answers_lose_their_publishing_format_only(clean, answer, expected):
    assert clean(answer) == expected


BAD_INPUT = [
    ("missing.jsonl", None, [], "no such file"),
    ("in.jsonl", "", [], "no rows"),
    ("in.json", "[]", [], "no rows"),
    ("in.jsonl", lines(ROWS[:2]) + '{"answer": "1", "id": 4}', [], "row 3 has no 'problem' (its keys: answer, id)"),
    ("in.jsonl", lines(ROWS[:2]) + '{"problem": "x"}', [], "row 3 has no 'answer'"),
    ("in.jsonl", lines(ROWS[:1]) + '{"problem": "x", "answer": null}', [], "row 2: 'answer' is empty or null"),
    ("in.jsonl", lines(ROWS[:1]) + '{"problem": "x", "answer": NaN}', [], "row 2: 'answer' is empty or null"),
    ("in.jsonl", lines(ROWS[:1]) + '{"problem": " ", "answer": 1}', [], "row 2: 'problem' is empty or null"),
    ("in.jsonl", lines(ROWS[:1]) + '{"problem": ["x"], "answer": 1}', [], "row 2: 'problem' is a list"),
    ("in.jsonl", lines(ROWS[:1]) + '{"problem": "x", "answer": true}', [], "row 2: 'answer' is a bool"),
    ("in.jsonl", lines(ROWS[:1]) + "{oops", [], "in.jsonl:2: not JSON"),
    ("in.jsonl", '[{"problem": "x"', [], "not a JSON list"),
    ("in.json", "[1, 2]", [], "row 1 is a int"),
    ("in.parquet", "PAR1 and no more", [], "cannot be read"),
    ("in.jsonl", lines(ROWS), ["--input_key", "text"], "row 1 has no 'text'"),
    ("in.jsonl", lines(ROWS), ["--test_size", "8"], "leave none to train on"),
    ("in.jsonl", lines(ROWS[:1]), [], "leave none to train on"),
    ("in.jsonl", lines(ROWS), ["--test_input", "none.json"], "none.json: no such file"),
    ("in.jsonl", lines(ROWS), ["--test_input", "in.jsonl"], "no training row is left"),
    ("in.jsonl", lines(ROWS), ["--test_input", "in.jsonl", "--test_size", "1"], "cannot be combined"),
]


@pytest.mark.parametrize(("name", "text", "options", "message"), BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, name, text, options, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    assert data_script.run(amc.main, ["--input", name, "--local_dir", "out", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert not Path("out").exists()


def test_bytes_that_are_no_text_are_one_line(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="cannot be read"):
        data_script.read_rows(str(tmp_path / "in.jsonl"), "train")


def test_a_failed_write_leaves_neither_file_nor_a_temporary(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_text("old")

    def full(table, file):
        file.write(b"half")
        if "test" in str(file.name):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(data_script.pq, "write_table", full)
    with pytest.raises(UserError, match="No space left"):
        data_script.write(tmp_path, {"train": [{"a": 1}], "test": [{"a": 1}]})
    assert os.listdir(tmp_path) == ["train.parquet"]
    assert (tmp_path / "train.parquet").read_text() == "old"


def test_a_hub_name_goes_to_the_hub(tmp_path, monkeypatch, hub):
    def rows(path, name, split):
        if split == "none":
            raise ValueError("Unknown split\n'none'")
        return ROWS

    asked = hub(rows)
    options = ["--input", "someone/amc-12", "--local_dir", str(tmp_path / "out"), "--prompt_split"]
    amc.main([*options, "validation", "--name", "2023"])
    assert asked == [("someone/amc-12", "2023", "validation")]
    with pytest.raises(UserError, match=r"'none' .*Unknown split 'none'; see --prompt_split and --name$"):
        amc.main([*options, "none"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        amc.main([*options, "train"])


@pytest.mark.parametrize("module", [aime, amc, math500])
@pytest.mark.parametrize("as_module", [True, False])
def test_scripts_run_both_ways(tmp_path, module, as_module):
    name = module.__name__.rpartition(".")[2]
    (tmp_path / "in.jsonl").write_text(lines(ROWS))
    start = ["-m", f"preprocess.{name}"] if as_module else [str(ROOT / "preprocess" / f"{name}.py")]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, *start, "--local_dir", str(tmp_path / "out"), "--input"]
    cwd = ROOT if as_module else tmp_path
    bad = subprocess.run([*command, str(tmp_path / "no.jsonl")], cwd=cwd, env=env, capture_output=True, text=True)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()
    good = subprocess.run([*command, str(tmp_path / "in.jsonl")], cwd=cwd, env=env, capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    assert len(read(tmp_path / "out" / "train.parquet")) == 6
