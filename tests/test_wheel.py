"""The wheel, unpacked outside the checkout, beside the packages of this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "recipe", "verl_dag", "envs", "preprocess", "workflows")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
# without `site`, which would put an editable installation of this checkout on the path
PYTHON = (sys.executable, "-S")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the unpacked wheel. It is built from a copy: setuptools writes into the sources."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        options = {"symlinks": True, "ignore": shutil.ignore_patterns("__pycache__")} if copy is shutil.copytree else {}
        copy(ROOT / part, folder / "source" / part, **options)
    command = [sys.executable, "-c", BUILD, str(folder)]
    built = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), sysconfig.get_path("purelib")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([*PYTHON, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def command(site: Path, folder: Path, *arguments: str) -> str:
    done = run(site, folder, "-m", "recipe.dag.cli", *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_two_names_are_on_top(site):
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"recipe", "verl_dag"}
    inside = {path.name for path in (site / "verl_dag").iterdir()} - {"__pycache__"}  # of the tests before this one
    assert inside == {"__init__.py", "envs", "preprocess", "workflows"}
    assert not any(path.is_symlink() for path in site.rglob("*"))


@pytest.mark.slow
def test_a_copy_of_each_shipped_workflow_and_a_new_task_load_outside_any_checkout(site, tmp_path):
    copies = [str(shutil.copy(path, tmp_path)) for path in sorted((ROOT / "workflows").glob("*.yaml"))]
    files = command(site, tmp_path, "new", "my_task").splitlines()
    assert "my_task/workflow.yaml" in files and files[-1] == "train it: bash my_task/run_tiny_cpu.sh"
    said = command(site, tmp_path, "validate", "--load", *copies, "my_task/workflow.yaml")
    assert said.count(": OK (") == len(copies) + 1 > 20
    assert "my_task/workflow.yaml: OK" in command(site, tmp_path, "validate", "--play", "my_task/workflow.yaml")
    script = (tmp_path / "my_task" / "run_tiny_cpu.sh").read_text()
    assert f". {site}/recipe/dag/scripts/tiny_cpu.sh" in script and str(ROOT) not in script


@pytest.mark.slow
def test_an_episode_is_played_and_the_project_s_modules_have_no_other_names(site, tmp_path):
    shutil.copy(ROOT / "workflows" / "workflow_grpo.yaml", tmp_path / "w.yaml")
    program = """
import importlib.util, verl_dag
import verl_dag.envs.workspace_env, verl_dag.preprocess.gsm8k, recipe.retool.teacher
assert not any(importlib.util.find_spec(name) for name in ("envs", "preprocess", "workflows"))
assert recipe.retool.teacher.WORKFLOW.is_file()
sample = {"prompt": "3 + 4?", "ground_truth": "7"}
print(verl_dag.__file__, verl_dag.play("w.yaml", sample, lambda messages: r"\\boxed{7}").outcome)
"""
    done = run(site, tmp_path, "-c", program)
    assert done.stdout == f"{site}/verl_dag/__init__.py 1.0\n", done.stderr


@pytest.mark.slow
def test_a_recipe_s_script_checks_its_settings_in_the_current_folder(site, tmp_path):
    listed = command(site, tmp_path, "run")
    assert "retool_ma/run_tiny_cpu.sh: ReTool-MA on a laptop" in listed and "smollm2" not in listed
    done = run(site, tmp_path, "-m", "recipe.dag.cli", "run", "retool_ma", "--tiny", "trainer.total_steps=1")
    assert done.returncode == 2 and "trainer.total_steps" in done.stderr, done.stdout + done.stderr
    links = {path.name: path.readlink() for path in (tmp_path / ".verl-dag").iterdir()}
    assert links["recipe"] == site / "recipe" and links["outputs"] == tmp_path / "outputs"
