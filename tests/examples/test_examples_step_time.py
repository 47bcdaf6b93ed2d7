"""What the comparisons of step times share: options, medians, the report. (Their runs need GPUs.)"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(params=["bench_step_time", "bench_placement"])
def bench(request, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module(request.param)


def test_medians_leave_out_the_steps_that_compile(bench, tmp_path):
    assert bench.medians_of({"a": [90.0, 50.0, 3.0, 1.0, 2.0], "b": [9.0, 9.0, 4.0]}, tmp_path) == {"a": 2.0, "b": 4.0}
    with pytest.raises(SystemExit, match=r"b reported 2 steps, see .*/b\.log; raise --steps"):
        bench.medians_of({"a": [1.0] * 5, "b": [1.0, 2.0]}, tmp_path)


def test_without_a_model_it_asks_for_one(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--model" in capsys.readouterr().err


def test_the_report_says_with_which_arguments(bench, tmp_path, capsys):
    args = bench.parser("what", "outputs/x", steps=3).parse_args(["--model", "m", "trainer.nnodes=2"])
    bench.write_report(tmp_path / "r.json", args, ratio=0.5)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ratio"] == 0.5 and report["arguments"]["overrides"] == "['trainer.nnodes=2']"
    assert json.loads(capsys.readouterr().out) == report
