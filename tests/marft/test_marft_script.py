"""The run script up to where it would start: what it needs, what it passes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipe" / "marft" / "run_qwen2_5-3b_marft.sh"


def run(path: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    env = {"PATH": path, "HOME": os.environ.get("HOME", "/"), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **env}
    command = [shutil.which("bash"), str(SCRIPT), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")


def expect_refusal(done: subprocess.CompletedProcess, what: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and what in done.stderr and "bash recipe/marft/run_tiny_cpu.sh" in done.stderr


@pytest.fixture
def tools(tmp_path) -> Path:
    """A PATH with what the script needs before it starts Python, and no nvidia-smi."""
    for name in ("bash", "dirname", "grep"):
        (tmp_path / name).symlink_to(shutil.which(name))
    return tmp_path


def test_without_a_gpu_it_points_to_the_tiny_run(tools):
    expect_refusal(run(str(tools), MODEL_PATH="model"), "no NVIDIA GPU")


def test_without_a_model_it_points_to_the_tiny_run(tools):
    smi = tools / "nvidia-smi"
    smi.write_text(f"#!{shutil.which('bash')}\necho 'GPU 0: a card'\n")
    smi.chmod(0o755)
    expect_refusal(run(str(tools)), "set MODEL_PATH")
    done = run(str(tools), "actor_rollout_ref.model.path=org/model", "data.shuffle=False")
    assert (done.returncode, done.stderr.partition(":")[2][:20]) == (2, " data.shuffle=False:")


def test_what_the_readme_shows(tools):
    flags = "algorithm.adv_estimator=gae_marft rollout.multi_turn.max_assistant_turns=3".split()
    done = run(str(tools), *flags, SHOW="1", DATA_DIR="d", WANDB_KEY="k", WORKFLOW="workflows/workflow_marft_code.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    expected = {"data.train_files=d/train.parquet", "trainer.logger=[console,tensorboard,wandb]"}
    assert expected <= set(done.stdout.splitlines())
    assert "max_turns: 3" in done.stdout and "dag_id: marft_code" in done.stdout
    assert done.stdout.index("estimator: gae_chain") > 0


def test_the_tiny_script_takes_a_seed_before_overrides():
    """Its arguments are parsed by bash alone; the rest of it installs and trains."""
    script = (ROOT / "recipe/marft/run_tiny_cpu.sh").read_text()
    head = script[script.index("seed=") : script.index(". recipe/dag")]
    for arguments, expected in (("", "0|"), ("2 a=1", "2|a=1"), ("a=1", "0|a=1"), ("007", "007|")):
        command = f'set -euo pipefail; set -- {arguments}; {head}\necho "$seed|$*"'
        assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout.strip() == expected
