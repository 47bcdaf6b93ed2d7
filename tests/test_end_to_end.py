"""The whole path on a CPU: Ray, verl's FSDP2 workers, the rollout server, sandboxed code, checkpoints, resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def material(tmp_path_factory, sandbox_level) -> SimpleNamespace:
    """A barely warm tiny model, a few problems, and `.options`, which name the sandbox that this machine can run."""
    folder = tmp_path_factory.mktemp("material")
    data = ["preprocess/arithmetic.py", "--local_dir", f"{folder}/data", "--train_size", "24", "--test_size", "8"]
    model = ["-m", "recipe.retool_ma.tiny.build", "--workflow", "workflows/workflow_retool_ma.yaml"]
    model += ["--output", f"{folder}/model", "--steps", "150", "--problems", "300"]
    for command in (data, model):
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(), check=True, timeout=300)
    return SimpleNamespace(folder=folder, options=[f"sandbox.{key}={value}" for key, value in sandbox_level.items()])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def start(
    material: SimpleNamespace, out: Path, *overrides: str, workflow: str = "workflow_retool_ma.yaml"
) -> subprocess.Popen:
    data = material.folder / "data"
    command = [
        *(sys.executable, "-m", "recipe.dag.main", "--config-path", "recipe/retool_ma/config"),
        *("--config-name", "tiny_cpu", f"workflow=workflows/{workflow}", f"output_dir={out}"),
        *(f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"),
        *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=3"),
        *("trainer.save_freq=1", "trainer.test_freq=3", "trainer.logger=[console,tensorboard,file]"),
        *(*material.options, *overrides),
    ]
    out.mkdir(parents=True, exist_ok=True)
    log = (out.parent / f"{out.name}.log").open("a")
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(MODEL_PATH=f"{material.folder}/model"),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(run: subprocess.Popen, out: Path) -> dict[int, dict]:
    assert run.wait(timeout=400) == 0, (out.parent / f"{out.name}.log").read_text()[-4000:]
    return steps(out)


def steps(out: Path) -> dict[int, dict]:
    path = out / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {line["step"]: line for line in lines}


def comparable(metrics: dict) -> dict:
    """Without what measures this machine: times and memory."""
    return {k: v for k, v in metrics.items() if not any(word in k for word in ("timing/", "seconds", "perf/", "mfu"))}


def test_a_killed_run_goes_on_as_if_nothing_had_happened(material, tmp_path):
    whole = finish(start(material, tmp_path / "whole"), tmp_path / "whole")
    assert sorted(whole) == [0, 1, 2, 3]
    assert 0.0 <= whole[0]["val/accuracy"] <= 1.0 and "val/accuracy" in whole[3]
    assert whole[1]["policy/main/logprob_diff/max"] <= 1e-4
    assert all(whole[step]["policy/main/grad_norm"] > 0 for step in (1, 2, 3))
    for name in ("results.json", "summary.json", "curve.png", "episodes.jsonl", "tracking.jsonl", "tensorboard"):
        assert (tmp_path / "whole" / name).exists(), name

    out = tmp_path / "killed"
    run = start(material, out)
    deadline = time.monotonic() + 300
    while not (out / "checkpoints" / "global_step_1" / "run.json").is_file():
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "killed.log").read_text()[-4000:]
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert 3 not in steps(out), "the run was over before it was killed"
    again = finish(start(material, out), out)
    assert "resumed from" in (tmp_path / "killed.log").read_text()
    assert sorted(again) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert comparable(again[step]) == pytest.approx(comparable(whole[step]), rel=1e-5, abs=1e-6), step


def test_three_policies_train_on_a_cpu(material, tmp_path):
    out = tmp_path / "separate"
    run = start(
        material, out, "trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1",
        workflow="workflow_retool_ma_separate.yaml",
    )  # fmt: skip
    metrics = finish(run, out)[1]
    policies = ("planner", "executor", "verifier")
    # a group in which all earned the same has no gradient, so a single policy may have none in one small step
    assert max(metrics[f"policy/{policy}/grad_norm"] for policy in policies) > 0
    for policy in policies:
        assert metrics[f"policy/{policy}/rows"] == 16
        assert (out / "checkpoints" / "global_step_1" / policy / "actor" / "huggingface" / "config.json").is_file()
