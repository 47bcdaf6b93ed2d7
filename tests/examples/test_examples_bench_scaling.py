"""The flagship on several numbers of GPUs: its arms, what is kept of them, and one of them for real on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from examples import bench_scaling
from examples.bench_scaling import Arm, add_efficiency, arms_of, summary
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.settings.pools import plan_pools
from tests.conftest import ROOT

TINY = ["platform=cpu", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.n=2", "data.max_prompt_length=4096"]


def step(seconds: float, tokens: float, **more: float) -> dict[str, float]:
    timings = {f"timing/{part}": 1.0 for part in bench_scaling.TIMINGS}
    metrics = {"timing/step": seconds, "timing/startup": 9.0, "rows/tokens_computed": tokens, "episode/count": 4.0}
    return timings | metrics | {"perf/main/update_tokens_per_s": 7.0, "policy/main/logprob_pearson": 0.99} | more


def test_an_arm_runs_on_the_cpu_and_earlier_ones_stay_in_the_file(zygote, joined_ray, monkeypatch, tmp_path, capfd):
    model = tmp_path / "model"
    subprocess.run(
        [zygote.python, "examples/random_model.py", model, "--shape", "tiny", "--vocab_size", "4096"]
        + ["--mean_tokens", "20"],
        cwd=ROOT,
        check=True,
    )
    for name, value in (joined_ray | {"CONFIG": "tiny_cpu", "CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(zygote.python))
    file = tmp_path / "scaling.json"
    file.write_text(json.dumps({"arms": {"weak@2": {"gpus": 2, "tokens_per_s_per_gpu": 1.0}}}))
    options = ["--arms", "strong@1", "--steps", "2", "--prompts", "1", "--out", str(tmp_path), *TINY]
    bench_scaling.main(["--model", str(model), *options])
    arms = json.loads(file.read_text())["arms"]
    found = arms["weak@1"]
    assert found["ended"] == "completed" and found["episodes"] == 2 and len(found["steps_s"]) == 2
    assert found["tokens"] > 100 and found["pearson"] > 0.999 and found["gap_s"] < found["step_s"]
    assert arms["weak@2"]["base"] == "weak@1" and arms["weak@2"]["efficiency"] < 0.1
    assert "weak@1: completed | steps" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("text", "counts", "arms"),
    [
        ("weak,strong", [1, 2, 4], "weak@1 weak@2 weak@4 strong@2 strong@4"),
        ("apart,lora@3", [1, 2], "apart@2 lora@3"),
    ],
)
def test_a_kind_without_a_number_is_an_arm_for_each_number(text, counts, arms):
    assert [str(arm) for arm in arms_of(text, counts)] == arms.split()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--arms", "weak,mine@2"], "unknown arm mine@2; choose from weak, strong"),
        (["--arms", "apart@1"], "apart@1: policies with GPUs of their own need two or more"),
        (["--arms", "weak@two"], "weak@two: after the @ comes a number"),
        (["--arms", "weak@4"], "weak@4 needs 4 GPUs, and 2 are visible"),
        (["--steps", "1"], "no step is left"),
    ],
)
def test_what_it_cannot_run_is_one_line(options, line, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SystemExit):
        bench_scaling.main(["--model", "model", *options])
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
def test_policies_apart_use_every_gpu(gpus, monkeypatch):
    monkeypatch.setenv("MODEL_PATH", "model")
    edits = [f"workflow.policies.{role}.gpus={count}" for role, count in Arm("apart", gpus).policy_gpus.items()]
    flow = load_edited(ROOT / "workflows" / bench_scaling.WORKFLOWS["apart"], split_edits(edits)[1])
    pools = plan_pools(flow, nnodes=1, n_gpus_per_node=gpus)
    assert sum(sum(pool.processes_on_nodes) for pool in pools) == gpus and len(pools) == min(gpus, 3)


def test_efficiency_is_of_the_same_policies_on_the_fewest_gpus():
    steps = [step(90.0, 50.0), step(2.0, 100.0), step(4.0, 200.0, **{"perf/main/max_memory_allocated_gb": 61.5})]
    found = summary(steps, gpus=2, warm_up=1)
    assert found["step_s"] == 3.0 and found["tokens_per_s_per_gpu"] == 25.0 and found["peak_gib"] == 61.5
    speeds = {"weak@2": 20.0, "weak@1": 25.0, "strong@2": 15.0, "together@2": 8.0, "apart@4": 12.0, "lora@2": 5.0}
    results = {name: {"gpus": int(name[-1]), "tokens_per_s_per_gpu": speed} for name, speed in speeds.items()}
    results["together@1"] = {"gpus": 1}  # it ended before it was measured
    add_efficiency(results)
    efficiency = {name: (result["base"], result["efficiency"]) for name, result in results.items() if len(result) > 2}
    assert efficiency == {
        "weak@2": ("weak@1", 0.8),
        "weak@1": ("weak@1", 1.0),
        "strong@2": ("weak@1", 0.6),
        "together@2": ("together@2", 1.0),
        "apart@4": ("together@2", 1.5),
        "lora@2": ("lora@2", 1.0),
    }


def test_the_steps_of_an_arm_that_reaches_the_limit_count(monkeypatch, tmp_path, capsys):
    lines = "".join(json.dumps(step(seconds, 100.0)) + "\n" for seconds in (9.0, 2.0))
    out, script = tmp_path / "out", tmp_path / "script.sh"
    script.write_text(
        f"mkdir -p {out}/weak@2\ncat > {out}/weak@2/metrics.jsonl <<'END'\n{lines}END\necho w\nsleep 900\n"
    )
    written = threading.Event()

    class Waited(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout != 7:
                return super().wait(timeout)
            while not (out / "weak@2.log").read_text():
                written.wait(0.05)
            raise subprocess.TimeoutExpired("arm", 7)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(bench_scaling, "SCRIPT", script)
    monkeypatch.setattr(subprocess, "Popen", Waited)
    bench_scaling.main(["--model", "m", "--arms", "weak@2", "--limit", "7", "--out", str(out)])
    found = json.loads((out / "scaling.json").read_text())["arms"]["weak@2"]
    assert found["ended"] == "limit of 7 s" and found["step_s"] == 2.0 and found["tokens_per_s_per_gpu"] == 25.0
    assert "weak@2: limit of 7 s | steps 9.0, 2.0 s" in capsys.readouterr().out


def test_arms_side_by_side_have_gpus_of_their_own(monkeypatch, tmp_path):
    started, both = {}, threading.Barrier(2, timeout=60)

    def run(arm, gpus, out, args):
        started[str(arm)] = gpus
        if arm.gpus < 3:
            both.wait()
        return {"ended": "completed", "gpus": arm.gpus} | summary([step(1.0, 1.0)] * 2, arm.gpus, 1)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    monkeypatch.setattr(bench_scaling, "run", run)
    bench_scaling.main(
        ["--model", "m", "--arms", "weak@1,lora@2,weak@3", "--prompts", "1", "--side_by_side", "--out", str(tmp_path)]
    )
    assert sorted(started["weak@1"] + started["lora@2"]) == ["3", "5", "6"] == started["weak@3"]
