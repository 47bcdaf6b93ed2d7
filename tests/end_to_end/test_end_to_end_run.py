"""The whole path on a CPU: Ray, verl's FSDP2 workers, rollout server, sandboxed code, checkpoints, resume."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import comparable, driver_of, episodes_of, finish, log_of, start, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def launch_of(out: Path, number: int) -> dict:
    return json.loads((out / "run" / str(number) / "launch.json").read_text())


def test_a_run_measures_and_writes_what_it_promises(whole):
    metrics = steps(whole)
    assert sorted(metrics) == [0, 1, 2, 3]
    assert 0.0 <= metrics[0]["val/accuracy"] <= 1.0 and "val/accuracy" in metrics[3]
    assert metrics[1]["policy/main/logprob_diff/max"] <= 1e-4
    assert all(
        metrics[step]["canary/main/logprob_diff"] <= 1e-5 and metrics[step]["timing/canary"] > 0 for step in (1, 3)
    )
    assert all(metrics[step]["policy/main/grad_norm"] > 0 for step in (1, 2, 3))
    assert all(metrics[step]["hack/any"] == 0.0 for step in (1, 2, 3))
    for name in ("results.json", "summary.json", "curve.png", "episodes.jsonl", "tracking.jsonl", "tensorboard"):
        assert (whole / name).exists(), name
    assert launch_of(whole, 1)["resumed_from"] is None
    calls = [call for episode in episodes_of(whole) for call in episode["calls"]]
    assert any(call["advantage"] for call in calls) and any(call["start_seconds"] > 0 for call in calls)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(material, whole, tmp_path):
    out = tmp_path / "killed"
    run = start(material, out, own_ray=True)
    deadline = time.monotonic() + 1200
    while not (out / "checkpoints" / "global_step_1" / "run.json").is_file():
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "killed.log").read_text()[-4000:]
        time.sleep(0.02)
    os.killpg(driver_of(material, run), signal.SIGKILL)
    run.wait()
    assert 3 not in steps(out), "the run was over before it was killed"
    again = finish(start(material, out), out)
    assert "resumed from" in (tmp_path / "killed.log").read_text()
    assert launch_of(out, 1)["resumed_from"] is None
    assert launch_of(out, 2)["resumed_from"] == str(out / "checkpoints" / f"global_step_{launch_of(out, 2)['step']}")
    lines = [json.loads(line)["step"] for line in (out / "tracking.jsonl").read_text().splitlines()]
    assert sorted(set(lines)) == lines == [0, 1, 2, 3]
    assert sorted(again) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert comparable(again[step]) == pytest.approx(comparable(steps(whole)[step]), rel=1e-5, abs=1e-6), step


def test_a_step_is_the_same_however_many_processes_play_its_episodes_and_without_the_canary(material, whole, tmp_path):
    out = tmp_path / "spread"
    last = ["trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    metrics = finish(start(material, out, "rollout.processes=2", "rollout.canary=false", *last), out)
    assert not [key for key in metrics[1] if "canary" in key]
    assert comparable(metrics[1]) == pytest.approx(comparable(steps(whole)[1]), rel=1e-5, abs=1e-6)
    found, alone = (
        {(e["uid"], e["index"]): [call["response_ids"] for call in e["calls"]] for e in episodes_of(folder)
         if e["step"] == 1}
        for folder in (out, whole)
    )  # fmt: skip
    assert len(found) == 16 and found == alone
    assert "starting 2 processes that run episodes" in log_of(out)


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
