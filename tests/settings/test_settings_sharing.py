"""Which policies should share GPUs, by what a run has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipe.dag.app.cli import app
from recipe.dag.settings.sharing import KEPT, Load, propose

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "workflows" / "workflow_retool_ma_separate.yaml"
COMPUTED = {"planner": 100_000, "executor": 200_000, "verifier": 300_000}


def load(seconds: float, *, gpus: int = 1, rollout: float = 0.0) -> Load:
    return Load(sampled=1.0, trained=1.0, computed=1.0, seconds=seconds, gpus=gpus, rollout=rollout)


def test_equal_policies_are_apart_since_sharding_costs_speed():
    best, other = propose({"a": load(10.0), "b": load(10.0)}, 2)
    assert len(best.own) == 1 and best.seconds == pytest.approx(10.0)  # the other one shares with none
    assert other.own == {} and other.seconds == pytest.approx(10.0 / KEPT)


def test_unequal_policies_share():
    best, other = propose({"a": load(30.0), "b": load(10.0)}, 2)
    assert best.own == {} and best.seconds == pytest.approx(20.0 / KEPT)
    assert other.seconds == pytest.approx(30.0)


def test_the_policy_with_half_of_the_work_is_apart_from_the_two_others():
    best, _ = propose({"a": load(10.0), "b": load(15.0), "c": load(25.0)}, 2)
    assert best.own == {"c": 1} and best.seconds == pytest.approx(25.0)


def test_work_of_four_gpus_is_balanced_and_the_rollout_counts():
    # on two GPUs each: training takes 10 / KEPT, and the servers' share of the rollout 8 and 2
    loads = {"a": load(20.0, rollout=16.0), "b": load(20.0, rollout=4.0)}
    best, other = propose(loads, 4)
    assert best.own == {} and best.seconds == pytest.approx(20.0 / 4 + 40.0 / 4 / KEPT**2)
    assert other.seconds == pytest.approx(8.0 + 10.0 / KEPT)


def test_a_measurement_on_several_gpus_counts_what_sharding_cost_it():
    measured = {name: load(10.0 / 2 / KEPT, gpus=2) for name in "ab"}
    assert propose(measured, 2)[0].seconds == pytest.approx(10.0)


def test_one_gpu_and_one_policy_leave_no_choice():
    assert [placement.own for placement in propose({"a": load(1.0), "b": load(1.0)}, 1)] == [{}]
    assert propose({"a": load(1.0)}, 4)[0].own == {}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A run of three policies on one GPU, whose first step was slow: the verifier did half of the work."""
    monkeypatch.setenv("MODEL_PATH", "m")
    lines = []
    for step in (0, 1, 2, 3):
        line = {"step": step, "val/accuracy": 0.5}
        if step:
            line |= {"timing/train": 60.0, "timing/rollout": 20.0}
            for name, tokens in COMPUTED.items():
                line |= {f"policy/{name}/total_tokens": tokens, f"policy/{name}/trained_tokens": tokens // 4}
                line |= {f"agent/{name}/calls": 256, f"agent/{name}/response_length/mean": tokens / 1024}
                line[f"timing/{name}.update"] = tokens / (1_000 if step == 1 else 10_000)
        lines.append(json.dumps(line) + "\n")
    launch = tmp_path / "run" / "1"
    launch.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (launch / "config.yaml").write_text("trainer: {n_gpus_per_node: 1, nnodes: 1}\n")
    (launch / "workflow.json").write_text(json.dumps({"policies": {name: {"gpus": None} for name in COMPUTED}}))
    return tmp_path


def plan(*arguments: object):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_plan_proposes_it_from_a_recorded_run(recorded):
    done = plan(WORKFLOW, "--from", recorded, "platform=cpu", "trainer.n_gpus_per_node=2")
    assert done.exit_code == 0, done.output
    *_, heading, planner, _, verifier, proposed, settings = done.output.splitlines()
    assert heading.startswith(f"Placement on 2 GPUs, by the steps of {recorded}")
    assert planner == (
        "  planner: 25,000 tokens sampled, 25,000 trained, 100,000 computed; 10.0 s of training on 1 GPU"
    )
    assert verifier.endswith("300,000 computed; 30.0 s of training on 1 GPU")
    # the verifier's half of the rollout's 20 s and of the training's 60 s
    alone = "  proposed: verifier alone on 1, planner and executor together on 1: about 40.0 s a step; "
    together = f"planner and executor and verifier together on 2: about {10 + 30 / KEPT:.1f} s a step"
    assert (proposed, settings) == (alone + together, "  settings: workflow.policies.verifier.gpus=1")


def test_on_several_machines_all_policies_share(recorded):
    done = plan(WORKFLOW, "--from", recorded, "platform=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=2")
    assert "  proposed: planner and executor and verifier together on 2: about" in done.output
    assert "settings:" not in done.output


def test_a_run_of_other_policies_is_refused(recorded):
    done = plan(ROOT / "workflows" / "workflow_retool_ma.yaml", "--from", recorded, "platform=cpu")
    assert str(done.exception) == f"{recorded}: it trained no policy `main`; name a run of this workflow"


def test_a_folder_without_a_step_or_a_launch_is_refused(recorded):
    (recorded / "metrics.jsonl").write_text('{"step": 0}\n')
    assert "no step of training" in str(plan(WORKFLOW, "--from", recorded, "platform=cpu").exception)
    (recorded / "run" / "1" / "config.yaml").unlink()
    assert "has no launch" in str(plan(WORKFLOW, "--from", recorded, "platform=cpu").exception)
