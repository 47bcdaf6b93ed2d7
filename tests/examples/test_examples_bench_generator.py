"""The benchmark runs and prints a ratio; what the ratio is depends on the machine."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_both_generators_make_every_token_that_was_asked_for():
    command = [sys.executable, "examples/bench_generator.py", "--requests", "4", "--tokens", "3", "--rounds", "1"]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert re.search(r"^ratio \d+\.\d\d$", run.stdout, re.M)
