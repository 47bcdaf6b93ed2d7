from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.end_to_end.runs import ROOT, environment, finish, start


@pytest.fixture(scope="session")
def material(made_once, sandbox_level, zygote, joined_ray) -> SimpleNamespace:
    """A barely warm tiny model, a few problems, `.options`, which name the sandbox that this machine can run, and
    a `.zygote` and a `.ray` that start quickly."""

    def make(folder: Path) -> None:
        data = [
            "-m",
            "recipe.tiny.arithmetic",
            "--local_dir",
            f"{folder}/data",
            "--train_size",
            "24",
            "--test_size",
            "8",
        ]
        model = ["-m", "recipe.tiny.build", "--workflow", "workflows/workflow_retool_ma.yaml"]
        model += ["--teacher", "recipe/retool_ma/teacher.py:Teacher"]
        model += ["--output", f"{folder}/model", "--steps", "150", "--problems", "300"]
        for command in (data, model):
            subprocess.run([zygote.python, *command], cwd=ROOT, env=environment(), check=True, timeout=1200)

    options = [f"sandbox.{key}={value}" for key, value in sandbox_level.items()]
    folder = made_once("material", make)
    return SimpleNamespace(folder=folder, options=options, zygote=zygote, ray=joined_ray)


@pytest.fixture(scope="session")
def whole(material, made_once) -> Path:
    """A run of three steps in which nothing went wrong."""

    def make(folder: Path) -> None:
        out = folder / "whole"
        finish(start(material, out, python=sys.executable), out)

    return made_once("whole", make) / "whole"
