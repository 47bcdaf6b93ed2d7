"""What the comparisons of step times share: options, medians, the report. (Their runs need GPUs.)"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AttentionInterface

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.policy import varlen
from recipe.dag.settings.compose import compose_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(params=["bench_step_time", "bench_placement"])
def bench(request, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module(request.param)


def test_medians_leave_out_the_steps_that_compile(bench, tmp_path):
    times = {"a": [90.0, 50.0, 3.0, 1.0, 2.0], "b": [9.0, 9.0, 4.0]}
    assert bench.medians_of(times, tmp_path, 2) == {"a": 2.0, "b": 4.0}
    assert bench.medians_of(times, tmp_path, 1) == {"a": 2.5, "b": 6.5}
    with pytest.raises(SystemExit, match=r"b reported 2 steps, see .*/b\.log; raise --steps"):
        bench.medians_of({"a": [1.0] * 5, "b": [1.0, 2.0]}, tmp_path, 2)


def test_without_a_model_it_asks_for_one(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--model" in capsys.readouterr().err


def test_the_report_says_with_which_arguments(bench, tmp_path, capsys):
    args = bench.parser("what", "outputs/x", steps=3).parse_args(["--model", "m", "trainer.nnodes=2"])
    bench.write_report(tmp_path / "r.json", args, ratio=0.5)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ratio"] == 0.5 and report["arguments"]["overrides"] == "['trainer.nnodes=2']"
    assert json.loads(capsys.readouterr().out) == report


@pytest.fixture
def step_time(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("bench_step_time")


def arguments(bench, *more: str):
    return bench.step_options().parse_args(["--model", "m", "--n", "12", *more])


@pytest.mark.parametrize(("arm", "agents", "episodes"), [("ours", 1, 12), ("three", 3, 4)])
def test_arms_of_one_and_three_agents_make_the_same_number_of_episodes(
    step_time, monkeypatch, tmp_path, arm, agents, episodes
):
    commands = []
    monkeypatch.setattr(step_time, "run", lambda command, log, gpu: commands.append(command))
    (tmp_path / arm).mkdir()
    (tmp_path / arm / "metrics.jsonl").write_text('{"timing/step": 2.5}\n')
    step_time.prepare(tmp_path, 3)
    assert step_time.ARMS[arm](tmp_path, arguments(step_time)) == [2.5]
    flow = load_workflow(tmp_path / f"workflow_{arm}.yaml")
    assert len(flow.agents) == agents and len(flow.policies) == 1
    assert f"actor_rollout_ref.rollout.n={episodes}" in commands[0]
    overrides = [word for word in commands[0][3:] if "=" in word]
    assert compose_config("dag", overrides).actor_rollout_ref.model.use_remove_padding  # known keys, and packed


@pytest.mark.parametrize(("arm", "attention", "tokens"), [("stock", "sdpa", 8192), ("tuned", "varlen", 16384)])
def test_verls_arms_differ_in_how_rows_are_computed(step_time, monkeypatch, tmp_path, arm, attention, tokens):
    commands, log = [], "step:1 - timing_s/step:4.5 - x:1\nstep:2 - timing_s/step:np.float64(3.25)"
    monkeypatch.setattr(step_time, "run", lambda command, file, gpu: commands.append(command) or log)
    step_time.prepare(tmp_path, 3)
    assert step_time.ARMS[arm](tmp_path, arguments(step_time)) == [4.5, 3.25]
    assert f"+actor_rollout_ref.model.override_config.attn_implementation={attention}" in commands[0]
    assert f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}" in commands[0]


def test_verls_workers_get_the_attention_by_a_module_beside_the_data(step_time, monkeypatch, tmp_path):
    step_time.prepare(tmp_path, 3)
    monkeypatch.syspath_prepend(str(tmp_path))
    import_module(step_time.ATTENTION)
    assert AttentionInterface()["varlen"] is varlen.attend


def test_problems_are_filled_to_about_a_prompt(step_time, tiny_model, tmp_path):
    import pandas as pd

    step_time.prepare(tmp_path, 2, model=str(tiny_model), tokens=60)
    problems = pd.read_parquet(tmp_path / "train.parquet").prompt
    assert problems[0][0]["content"].startswith("17 plus 11 is 17 plus 11 is")


def test_an_unknown_arm_and_episodes_that_three_cannot_share_are_one_line(step_time, monkeypatch, capsys):
    for words, line in ((["--arms", "mine"], "unknown arm mine"), (["--arms", "three", "--n", "4"], "a multiple of 3")):
        monkeypatch.setattr(sys, "argv", ["bench", "--model", "m", *words])
        with pytest.raises(SystemExit):
            step_time.main()
        assert line in capsys.readouterr().err


def test_arms_that_a_slash_separates_run_on_gpus_of_their_own(step_time, monkeypatch, tmp_path):
    started = []

    def arm(name, out, args):
        started.append((name, args.gpu))
        return [1.0]

    monkeypatch.setattr(step_time, "ARMS", {name: partial(arm, name) for name in ("stock", "tuned", "ours")})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    parts = [["stock"], ["tuned", "ours"]]
    assert set(step_time.measure(parts, tmp_path, arguments(step_time))) == {"stock", "tuned", "ours"}
    assert sorted(started) == [("ours", "7"), ("stock", "4"), ("tuned", "7")]
    step_time.measure([["stock", "ours"]], tmp_path, arguments(step_time))
    assert started[3:] == [("stock", None), ("ours", None)]
    with pytest.raises(SystemExit, match="3 parts, and 2 GPUs"):
        step_time.measure([["stock"], ["tuned"], ["ours"]], tmp_path, arguments(step_time))
