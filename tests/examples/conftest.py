"""Scripts of examples/ as a user runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="session")
def run_example(zygote) -> Callable[..., str]:
    """`run_example(script, *options)` returns what the script prints."""

    def run(script: str, *options: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [zygote.python, f"examples/{script}", *options]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
