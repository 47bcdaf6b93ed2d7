"""Runs of the trainer as its users start them, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
TWO_STEPS = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
TWO_STEPS.append("trainer.logger=[console]")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def _hear_interrupts() -> None:
    """A shell's background job ignores SIGINT, and so would the runs of tests in one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(
    material: SimpleNamespace,
    out: Path,
    *overrides: str,
    workflow: Path | str = "workflow_retool_ma.yaml",
    cwd: Path = ROOT,
    python: str | None = None,
    own_ray: bool = False,
    **env: str,
) -> subprocess.Popen:
    """`python`: sys.executable for a run that starts as its users' do; by default it and its workers are forked, and it
    joins a Ray unless it shall have its own."""
    data = material.folder / "data"
    command = [
        *(
            python or material.zygote.python,
            "-m",
            "recipe.dag.main",
            "--config-path",
            f"{ROOT}/recipe/retool_ma/config",
        ),
        *("--config-name", "tiny_cpu", f"workflow={ROOT / 'workflows' / workflow}", f"output_dir={out}"),
        *(f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"),
        *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=3"),
        *("trainer.save_freq=1", "trainer.test_freq=3", "trainer.logger=[console,tensorboard,file]"),
        *([] if any(key.startswith("sandbox.url=") for key in overrides) else material.options),
        *overrides,
    ]
    if python is None and not own_ray and "RAY_ADDRESS" not in env:
        env = {**material.ray, **env}
    out.mkdir(parents=True, exist_ok=True)
    log = (out.parent / f"{out.name}.log").open("a")
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**{"MODEL_PATH": f"{material.folder}/model", **env}),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_hear_interrupts,
    )


def driver_of(material: SimpleNamespace, run: subprocess.Popen) -> int:
    """Return the process of a forked run."""
    return material.zygote.child_of(run.pid)


def finish(run: subprocess.Popen, out: Path) -> dict[int, dict]:
    try:
        assert run.wait(timeout=1200) == 0, (out.parent / f"{out.name}.log").read_text()[-4000:]
    finally:
        run.kill()  # it would train on beside the tests that follow
    return steps(out)


def steps(out: Path) -> dict[int, dict]:
    path = out / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {line["step"]: line for line in lines}


def log_of(out: Path) -> str:
    return (out.parent / f"{out.name}.log").read_text()


def episodes_of(out: Path, split: str = "train") -> list[dict]:
    episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    return [episode for episode in episodes if episode["split"] == split]


def rewards_of(out: Path) -> dict[tuple, dict]:
    """What each training episode earned, by agent; {} for one that a fault took out."""
    return {
        (e["step"], e["uid"], e["index"]): {c["agent"]: c["reward"] for c in e["calls"]} if e["fault"] is None else {}
        for e in episodes_of(out)
    }


def comparable(metrics: dict) -> dict:
    """Without what measures this machine: times, memory, and the rounding (1e-6) of a forward that others share."""
    return {
        k: v
        for k, v in metrics.items()
        if not any(word in k for word in ("timing/", "seconds", "perf/", "mfu", "logprob_diff", "server_kl"))
    }


def two_steps(material, tmp_path, workflow: str, score: str, *overrides: str) -> tuple[dict[int, dict], Path]:
    """(metrics by step, the run's folder) of two steps of `workflow`, whose rewards `score` gives."""
    (tmp_path / "score.py").write_text(score)
    (tmp_path / "workflow.yaml").write_text(workflow)
    out = tmp_path / "first"
    run = start(material, out, *TWO_STEPS, *overrides, workflow=tmp_path / "workflow.yaml")
    return finish(run, out), out


def goes_on_from(checkpoint: Path, material, tmp_path, metrics: dict[int, dict], *overrides: str) -> None:
    """A run that resumes from the first step's checkpoint makes the second step as `two_steps` did."""
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    again = tmp_path / "again"
    run = start(material, again, *TWO_STEPS, *resume, *overrides, workflow=tmp_path / "workflow.yaml")
    resumed = finish(run, again)
    assert list(resumed) == [2]
    new, old = comparable(resumed[2]), comparable(metrics[2])
    assert new.keys() == old.keys(), new.keys() ^ old.keys()
    changed = {key: (new[key], old[key]) for key in new if new[key] != pytest.approx(old[key], rel=1e-5, abs=1e-6)}
    assert not changed, changed
