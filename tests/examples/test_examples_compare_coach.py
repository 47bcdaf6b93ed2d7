"""The comparison of runs with and without a coach: what it trains, its table and figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import compare_coach as compare
from recipe.dag.core.errors import UserError


def metrics(folder: Path, values: dict[int, float]) -> None:
    folder.mkdir(parents=True)
    lines = [{"step": step, "val/accuracy": value, "episode/accuracy": value / 2} for step, value in values.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_runs_that_exist_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    for seed in (0, 1):
        metrics(compare.folder_of(seed, "1"), {0: 0.25, 5: 0.75 + seed / 8})
        metrics(compare.folder_of(seed, "0"), {0: 0.25, 5: 0.5})
    assert compare.folder_of(1, "0") == tmp_path / "outputs" / "mathchat_tiny_seed1_coach0"
    compare.main(["--only-report", "--seeds", "0", "1", "--output", str(tmp_path / "out")])
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| 1 | 1 | 0.250 | 0.875 |" in text and "| 0 | 0 | 0.250 | 0.500 |" in text
    assert "weight 1: +0.562" in text and "weight 0: +0.250" in text and text in capsys.readouterr().out
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    metrics(compare.folder_of(3, "1"), {0: 0.25, 5: 0.5, 10: 0.75})
    with pytest.raises(UserError, match="some runs are not finished"):
        compare.main(["--only-report", "--seeds", "0", "3", "--weights", "1"])
    (compare.folder_of(3, "1") / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="has no val/accuracy yet"):
        compare.main(["--only-report", "--seeds", "3", "--weights", "1"])
    with pytest.raises(UserError, match="seed2/metrics.jsonl does not exist"):
        compare.main(["--only-report", "--seeds", "2"])
    with pytest.raises(UserError, match="dsbench_tiny_seed2/metrics.jsonl does not exist"):
        compare.main(["--only-report", "--seeds", "2", "--recipe", "dsbench"])


def test_what_is_missing_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    script = tmp_path / "recipe" / "mathchat" / "run_tiny_cpu.sh"
    script.parent.mkdir(parents=True)
    script.write_text(f'echo "$1 $COACH_WEIGHT" >> {tmp_path}/ran; exit ${{CODE:-0}}\n')
    profile = tmp_path / "recipe" / "mathchat" / "config" / "tiny_cpu.yaml"
    profile.parent.mkdir()
    profile.write_text("trainer: {total_training_steps: 20}\n")
    metrics(compare.folder_of(0, "1"), {0: 0.25, 20: 0.5})
    metrics(compare.folder_of(0, "0"), {0: 0.25, 5: 0.5})  # interrupted
    compare.train(0, "1")
    compare.train(0, "0")
    compare.train(1, "0")
    assert (tmp_path / "ran").read_text() == "0 0\n1 0\n"
    monkeypatch.setenv("CODE", "4")
    with pytest.raises(UserError, match="seed 2, COACH_WEIGHT=0: run_tiny_cpu.sh ended with 4"):
        compare.train(2, "0")
