from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.end_to_end.runs import ROOT, environment, finish, start


@pytest.fixture(scope="session")
def material(tmp_path_factory, sandbox_level) -> SimpleNamespace:
    """A barely warm tiny model, a few problems, and `.options`, which name the sandbox that this machine can run."""
    folder = tmp_path_factory.mktemp("material")
    data = ["preprocess/arithmetic.py", "--local_dir", f"{folder}/data", "--train_size", "24", "--test_size", "8"]
    model = ["-m", "recipe.tiny.build", "--workflow", "workflows/workflow_retool_ma.yaml"]
    model += ["--teacher", "recipe/retool_ma/teacher.py:Teacher"]
    model += ["--output", f"{folder}/model", "--steps", "150", "--problems", "300"]
    for command in (data, model):
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(), check=True, timeout=550)
    return SimpleNamespace(folder=folder, options=[f"sandbox.{key}={value}" for key, value in sandbox_level.items()])


@pytest.fixture(scope="session")
def whole(material) -> Path:
    """A run of three steps in which nothing went wrong."""
    out = material.folder / "whole"
    finish(start(material, out), out)
    return out
