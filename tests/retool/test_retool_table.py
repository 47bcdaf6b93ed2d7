"""The table of base, SFT and GRPO."""

from __future__ import annotations

import json

import pytest

from recipe.dag.train.data_script import run
from recipe.retool.table import STAGES, improves, lines, main, stage_table


def write(folder, stage: str, solved: list[int], n: int = 8, errors: int = 0) -> None:
    """Write an evaluation in which problem p is solved in solved[p] of n episodes."""
    items = [
        {"sample_index": index, "metrics": {"is_correct": index < count}} for count in solved for index in range(n)
    ]
    items[: errors * n : n] = [{"sample_index": 0, "error": "lost"} for _ in range(errors)]
    path = folder / f"eval_{stage}"
    path.mkdir(parents=True)
    (path / "results.json").write_text(json.dumps(items))


def test_the_table_has_each_stages_accuracy_and_interval(tmp_path, capsys):
    write(tmp_path, "base", [0, 1] * 8)
    write(tmp_path, "sft", [3, 5] * 8, errors=2)
    write(tmp_path, "grpo", [7, 8] * 8)
    main([str(tmp_path)])
    table = json.loads((tmp_path / "table.json").read_text())
    assert tuple(table) == STAGES
    assert table["base"]["accuracy"] == 0.0625 and table["grpo"]["accuracy"] == 0.9375
    assert all(row["low"] < row["accuracy"] < row["high"] for row in table.values())
    counts = [(row["problems"], row["episodes"], row["errors"]) for row in table.values()]
    assert counts == [(16, 128, 0), (16, 126, 2), (16, 128, 0)]
    out = capsys.readouterr().out
    assert "grpo      0.938" in out and out.endswith(f"each stage improves -> {tmp_path / 'table.json'}\n")


def test_overlapping_intervals_are_reported(tmp_path, capsys):
    write(tmp_path, "base", [0] * 16)
    write(tmp_path, "sft", [3, 5] * 8)
    write(tmp_path, "grpo", [3, 6] * 8)
    assert not improves(stage_table(tmp_path)) and len(lines(stage_table(tmp_path))) == 4
    main([str(tmp_path)])
    assert "the intervals of two stages overlap" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stages", "message"),
    [([], "eval_base/results.json does not exist"), (["base", "sft"], "eval_grpo/results.json does not exist")],
)
def test_a_missing_evaluation_is_one_line(tmp_path, capsys, stages, message):
    for stage in stages:
        write(tmp_path, stage, [1] * 4)
    assert run(main, [str(tmp_path)]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "table.json").exists()
