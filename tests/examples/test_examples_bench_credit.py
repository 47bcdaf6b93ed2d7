"""The benchmark names every estimator; what the numbers are depends on the machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.dag.algorithms.catalogue import SELECTABLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("option", [[], ["--ragged"]])
def test_every_estimator_is_measured(option):
    command = [sys.executable, "examples/bench_credit.py", "--rows", "64", "--tokens", "16", "--rounds", "1", *option]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = re.findall(r"^(\w+) +\d+\.\d\d +\d+\.\d\d +\d+ +\d+\.\d +\d+\.\d$", run.stdout, re.M)
    assert lines == [*SELECTABLE, "uncertainty", "happo", "shaping", "vote"]
    parts = re.findall(r"^(\w+), (\w+) +\d+\.\d\d +\d+\.\d\d +\d+$", run.stdout, re.M)
    assert parts == [(name, part) for name in ("vdn", "qmix") for part in ("credit", "fit")]
