"""The comparison of numbers of processes, with Ray's own actors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_measures_each_number_and_compares_the_records(zygote):
    options = ["--episodes", "32", "--wait", "0.001", "--processes", "1", "2", "--rounds", "1"]
    done = subprocess.run(
        [zygote.python, "examples/bench_processes.py", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line.partition(" processes: ")[0] for line in lines if " processes: " in line] == ["1", "2"]
    assert lines[-1] == "the records are the same"
