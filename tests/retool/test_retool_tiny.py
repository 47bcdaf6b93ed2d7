"""The laptop run: what its script starts, in which order, with which models; and, slowly, the run itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laptop import Laptop, option

ROOT = Path(__file__).parents[2]
SCRIPT = "recipe/retool/run_tiny_cpu.sh"

FAKE_PYTHON = """#!/bin/bash
printf '%s\\t' python "${MODEL_PATH:-}" "$@" >> "$LOG"; echo >> "$LOG"
case "$*" in *"recipe.dag.main --check"*) ;; *recipe.dag.main*)
  for step in 10 20; do
    mkdir -p "$OUT/checkpoints/global_step_$step/main/actor/huggingface"
    touch "$OUT/checkpoints/global_step_$step/main/actor/huggingface/config.json"
  done ;;
esac
"""
FAKE_COMMAND = """#!/bin/bash
printf '%s\\t' "$@" >> "$LOG"; echo >> "$LOG"
case $1 in
  serve) if [ -n "${BROKEN_SERVER:-}" ]; then echo "error: no model" >&2; exit 2; fi
    echo $$ >> "$PIDS"; sleep 0.2; echo http://127.0.0.1:1234/v1; exec sleep 60 ;;
  eval) while [ $# -gt 1 ]; do [ "$1" != --output ] || results=$2; shift; done
    mkdir -p "$results"; echo "[]" > "$results/results.json"
    echo '{"num_errors": '${ERRORS:-0}'}' > "$results/summary.json" ;;
esac
"""


class ReToolLaptop(Laptop):
    def run(self, *arguments: str, name: str = "retool_tiny", **env: str) -> tuple[int, list[list[str]], str]:
        """Return the exit code, the commands without those of pip and without `checks`, and stderr."""
        code, calls, stderr = super().run(*arguments, OUT=f"outputs/{name}", **env)
        self.checks = [call for call in calls if "--check" in call]
        return code, [call for call in calls if call not in self.checks], stderr


@pytest.fixture
def laptop(tmp_path) -> ReToolLaptop:
    return ReToolLaptop(tmp_path, SCRIPT, {"python": FAKE_PYTHON, "verl-dag": FAKE_COMMAND})


@pytest.mark.parametrize(
    ("arguments", "env", "seed", "overrides"),
    [((), {}, "0", []), (("2", "a=1"), {}, "2", ["a=1"]), (("a=1", "b=2"), {"SEED": "3"}, "3", ["a=1", "b=2"])],
)
def test_the_stages_run_in_order_each_on_the_model_of_the_one_before(laptop, arguments, env, seed, overrides):
    name = "retool_tiny" + (f"_seed{seed}" if seed != "0" else "")
    code, calls, _ = laptop.run(*arguments, name=name, **env)
    assert code == 0
    data, base, transcripts, sft, train, *evaluations, table = calls
    assert [check[len(check) - len(overrides) :] for check in laptop.checks] == ([overrides] if overrides else [])
    out = f"outputs/{name}"
    assert data[2:5] == ["recipe/tiny/arithmetic.py", "--local_dir", f"{out}/data"]
    assert option(base, "--output") == option(sft, "--model") == f"{out}/model"
    assert option(transcripts, "--output") == sft[1] == f"{out}/data/sft.parquet" and sft[0] == "sft"
    assert all(option(call, "--seed") == seed for call in (data, base, transcripts))
    assert {f"seed={seed}", "optim.lr=5e-4"} <= set(sft) and option(sft, "--output") == f"{out}/sft"
    assert {f"seed={seed}", f"model_path={out}/sft/huggingface", f"trainer.experiment_name={name}"} <= set(train)
    assert train[len(train) - len(overrides) :] == overrides
    last = f"{out}/checkpoints/global_step_20/main/actor/huggingface"
    models = [call[1] for call in evaluations if call[0] == "serve"]
    assert models == [f"{out}/model", f"{out}/sft/huggingface", last]
    plays = [call for call in evaluations if call[0] == "eval"]
    assert [option(call, "--output") for call in plays] == [f"{out}/eval_{stage}" for stage in ("base", "sft", "grpo")]
    assert all(option(call, "--base-url") == "http://127.0.0.1:1234/v1" for call in plays)
    assert all((option(call, "-n"), option(call, "--seed")) == ("8", seed) for call in plays)
    assert all(option(call, "--data") == f"{out}/data/test.parquet" for call in plays)
    assert table[-2:] == ["recipe.retool.table", out]
    assert laptop.servers_left() == []


def served(calls: list[list[str]]) -> list[str]:
    return [option(call, "--model-name").partition("-")[0] for call in calls if call[0] == "serve"]


def test_a_second_run_evaluates_only_models_that_changed(laptop):
    _, calls, _ = laptop.run()
    assert served(calls) == ["base", "sft", "grpo"]
    model = laptop.root / "outputs" / "retool_tiny" / "sft" / "huggingface"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_text("other weights")
    code, calls, _ = laptop.run()
    assert code == 0 and served(calls) == ["sft"]
    code, calls, _ = laptop.run()
    assert code == 0 and served(calls) == []


def test_an_evaluation_with_errors_or_of_another_size_is_run_again(laptop):
    laptop.run(ERRORS="3")
    _, calls, _ = laptop.run(SAMPLES="2")
    assert served(calls) == ["base", "sft", "grpo"]
    _, calls, _ = laptop.run()
    assert served(calls) == ["base", "sft", "grpo"]


def test_another_base_model_has_a_folder_of_its_own(laptop):
    _, calls, _ = laptop.run(name="retool_tiny_base20", BASE_STEPS="20")
    assert calls[-1][-1] == "outputs/retool_tiny_base20"


def test_a_server_that_does_not_start_ends_the_run_with_its_reason(laptop):
    code, calls, stderr = laptop.run(BROKEN_SERVER="1")
    assert code == 1 and stderr.endswith("error: no model\n") and calls[-1][0] == "serve"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not list(Path(sys.prefix).glob(".verl-dag-*")), reason="needs the scripts' environment")
def test_the_run_writes_its_table_and_resumes(zygote, joined_ray):
    """Small sizes: the figures mean nothing, but every stage is real."""
    seed = "987654"
    out = ROOT / "outputs" / f"retool_tiny_seed{seed}_base20"
    shutil.rmtree(out, ignore_errors=True)
    sizes = {
        "BASE_STEPS": "20",
        "SAMPLES": "1",
        "PYTHONPATH": str(ROOT),
        "VERL_DAG_VENV": str(zygote.folder),
        **joined_ray,
    }
    command = ["bash", str(ROOT / SCRIPT), seed, "trainer.total_training_steps=1", "data.train_batch_size=4"]
    try:
        for repeated in (False, True):
            done = subprocess.run(command, env={**os.environ, **sizes}, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            table = json.loads((out / "table.json").read_text())
            assert list(table) == ["base", "sft", "grpo"]
            for row in table.values():
                assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
                assert (row["problems"], row["episodes"], row["errors"]) == (64, 64, 0)
            assert ("64 episodes, 0 errors" in done.stdout + done.stderr) != repeated
    finally:
        shutil.rmtree(out, ignore_errors=True)
