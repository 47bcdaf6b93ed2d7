"""`verl-dag new`: what it writes is valid, tested and trains as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipe.dag.app.cli import app
from recipe.dag.app.new import ROOT, TEMPLATE, new_task
from recipe.dag.core.errors import UserError

FILES = set(
    "README.md agents.py config/tiny_cpu.yaml data.py run_tiny_cpu.sh teacher.py test_task.py workflow.yaml".split()
)


@pytest.fixture
def task(tmp_path) -> Path:
    result = CliRunner().invoke(app, ["new", str(tmp_path / "my_task")])
    assert result.exit_code == 0 and result.output.endswith(f"train it: bash {tmp_path}/my_task/run_tiny_cpu.sh\n")
    return tmp_path / "my_task"


def test_every_file_is_there_and_complete(task):
    assert {str(path.relative_to(task)) for path in task.rglob("*") if path.is_file()} == FILES
    assert not any(re.search(r"@\w+@", path.read_text()) for path in task.rglob("*.*"))
    assert os.access(task / "run_tiny_cpu.sh", os.X_OK)
    subprocess.run(["bash", "-n", str(task / "run_tiny_cpu.sh")], check=True)
    schema = (task / "workflow.yaml").read_text().splitlines()[0].partition("$schema=")[2]
    assert (task / schema).resolve() == ROOT / "workflows" / "workflow.schema.json"


def test_its_workflow_is_valid_and_its_own_tests_pass(task):
    result = CliRunner().invoke(app, ["validate", "--load", str(task / "workflow.yaml")])
    assert result.exit_code == 0 and "OK (2 agents, 1 policy, 2 rollout nodes)" in result.output
    command = [sys.executable, "-m", "pytest", str(task), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["My_Task", "1st", "my task", "_x"])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="a task's name consists of"):
        new_task(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        new_task(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert len(new_task(tmp_path / "empty")) == len(FILES)
    assert len(list(tmp_path.iterdir())) == 2, "nothing partial is left"


def test_the_template_is_what_is_written():
    parts = (path for path in TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {str(path.relative_to(TEMPLATE)) for path in parts} == FILES


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not list(Path(sys.prefix).glob(".verl-dag-*")), reason="needs the scripts' environment")
def test_it_trains_as_it_is(task, zygote, joined_ray):
    environment = {**os.environ, "VERL_DAG_VENV": str(zygote.folder), **joined_ray}
    out = task.parent / "out"
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1", f"output_dir={out}"]
    command = ["bash", str(task / "run_tiny_cpu.sh"), *short]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 2 and steps[-1]["policy/main/grad_norm"] > 0
