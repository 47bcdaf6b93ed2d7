"""The script checks its arguments in one line, and twice the same command gives the same files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.dialogues import byte_tokenizer

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory, zygote) -> Path:
    """A folder with in.parquet and a tokenizer that does not need training."""
    folder = tmp_path_factory.mktemp("place")
    byte_tokenizer(TEMPLATE).save_pretrained(folder / "tokenizer")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}?" * (1 + n % 3 * 1000)}],
            "reward_model": {"ground_truth": str(n)},
        }
        for n in range(30)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "in.parquet")
    (folder / "in.txt").touch()
    (folder / "bin").symlink_to(zygote.folder / "bin")
    return folder


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "recipe/retool/preprocess_data.sh"), *arguments]
    return subprocess.run(command, cwd=place, env={**os.environ, "PATH": path}, capture_output=True, text=True)


def test_rows_are_filtered_and_split_and_again_with_the_same_bytes(place):
    files = []
    for _ in range(2):
        done = run(place, "in.parquet", "data/out", "tokenizer", "--val_size=5", "--max_prompt_length", "4000")
        assert (done.returncode, done.stderr) == (0, "")
        assert "kept 20 of 30 rows (66.7 %)" in done.stdout
        assert sorted(path.name for path in (place / "data/out").iterdir()) == ["train.parquet", "val.parquet"]
        files.append([(place / f"data/out/{name}.parquet").read_bytes() for name in ("train", "val")])
    assert files[0] == files[1]
    assert [pq.read_metadata(place / f"data/out/{name}.parquet").num_rows for name in ("train", "val")] == [15, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "IN is missing"),
        (["in.parquet"], "OUT is missing"),
        (["in.parquet", "out"], "TOKENIZER is missing"),
        (["in.parquet", "", "tokenizer"], "OUT is missing"),
        (["in.parquet", "--val_size", "5"], "OUT is missing"),
        (["<IN>", "out", "tokenizer"], "IN is a placeholder: <IN>"),
        (["in.parquet", "/path/to/output", "tokenizer"], "OUT is a placeholder"),
        (["in.parquet", "out", "TOKENIZER"], "TOKENIZER is a placeholder"),
        (["absent.parquet", "out", "tokenizer"], "IN does not exist"),
        (
            ["in.parquet", "new.parquet", "tokenizer"],
            "OUT is a folder, which gets train.parquet and val.parquet, not a file",
        ),
        (["in.parquet", "in.txt", "tokenizer"], "OUT is a file"),
        (["in.parquet", "out", "tokenizer", "more"], "unexpected argument: more"),
        (["in.parquet", "out", "tokenizer", "--val_size"], "--val_size needs a value"),
        (["in.parquet", "out", "tokenizer", "--val_size", "ten"], "--val_size must be a whole number"),
        (
            ["in.parquet", "out", "tokenizer", "--max_prompt_length=0"],
            "--max_prompt_length must be a whole number of 1",
        ),
        (["in.parquet", "out", "tokenizer", "--prompt_length", "5"], "unknown option: --prompt_length"),
        (["in.parquet", "out", "tokenizer", "--workflow", "w.yaml"], "--workflow does not exist"),
        (["in.parquet", "out", "./absent"], "--tokenizer ./absent: no such folder"),
        (["in.parquet", "out", "tokenizer", "--val_size", "10"], "10 validation rows of 10 leave none to train on"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_two(place, arguments, message):
    done = run(place, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message in done.stderr
    assert done.stderr.startswith("error: ")
    assert not (place / "out").exists() or list((place / "out").iterdir()) == []
