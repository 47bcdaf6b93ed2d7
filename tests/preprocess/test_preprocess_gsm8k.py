"""GSM8K to parquet: splits, ground truths, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from recipe.dag.train import data_script
from verl_dag.preprocess import gsm8k as script

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    "train": [{"question": f"{n} + {n}?", "answer": f"<<{n}+{n}={2 * n}>>\n#### {2 * n}"} for n in range(8)],
    "test": [{"question": "600 + 600?", "answer": "much\n#### 1,200"}],
}


def truths(folder: Path, split: str) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in pq.read_table(folder / f"{split}.parquet").to_pylist()]


def test_the_hubs_splits_become_the_two_files(tmp_path, hub):
    asked = hub(lambda path, name, split: ROWS[split])
    script.main(["--local_dir", str(tmp_path)])
    assert asked == [(script.HUB_NAME, "main", "train"), (script.HUB_NAME, "main", "test")]
    assert truths(tmp_path, "train") == [str(2 * n) for n in range(8)] and truths(tmp_path, "test") == ["1200"]


def test_a_copy_of_the_hubs_folder_is_read(gsm8k, tmp_path):
    script.main(["--input", str(gsm8k), "--name", "main", "--local_dir", str(tmp_path / "out")])
    assert len(truths(tmp_path / "out", "train")) == 8
    assert truths(tmp_path / "out", "test") == ["1000", "1001", "1002", "1003"]


def test_files_run_from_anywhere(tmp_path):
    for split, rows in ROWS.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(ROOT / "preprocess/gsm8k.py"), "--input", "train.jsonl", "--local_dir", "out"]
    done = subprocess.run([*command, "--test_input", "test.jsonl"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert truths(tmp_path / "out", "test") == ["1200"]


def test_an_answer_without_hashes_is_one_line(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "It is 2."}) + "\n")
    assert (
        data_script.run(script.main, ["--input", str(tmp_path / "in.jsonl"), "--local_dir", str(tmp_path / "out")]) == 2
    )
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "without a line that starts with ####: 'It is 2.'" in captured.err
    assert not (tmp_path / "out").exists()
