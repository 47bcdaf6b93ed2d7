"""Programs that run once per rank."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def run_ranks(python: str, script: Path, world: int, out: Path, *arguments: str) -> None:
    """Run `script RANK WORLD ARGUMENT...` for each rank at the same time. `out`: gets score.py, a reward."""
    (out / "score.py").write_text("def score(episode): return {}\n")
    env = os.environ | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    commands = [[python, str(script), str(rank), str(world), *arguments] for rank in range(world)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) for command in commands]
    errors = [process.communicate(timeout=900)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(error[-3000:] for error in errors)
