"""The table of memory in the recipe's README is what `plan` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.settings import defaults
from recipe.dag.settings.compose import compose_config
from recipe.dag.settings.defaults import decide
from recipe.dag.workflow.machine import Machine
from tests.workflow.shapes import QWEN, write_config

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipe" / "retool_ma"
ROW = re.compile(r"^\| Qwen2.5-(\S+) \| (\d) \| (\d) \| (\S+) \| (\S+) \| (\S+) \| (.+?) \| (\S+) \|$", re.MULTILINE)
ROWS = ROW.findall((RECIPE / "README.md").read_text())


@pytest.mark.parametrize(
    ("model", "policies", "gpus", "rollout", "backward", "step", "offload", "host"),
    ROWS,
    ids=["-".join(row[:3]) for row in ROWS],
)
def test_a_row_is_what_plan_says(model, policies, gpus, rollout, backward, step, offload, host, tmp_path, monkeypatch):
    name = {"1": "workflow_retool_ma.yaml", "3": "workflow_retool_ma_separate.yaml"}[policies]
    config = compose_config("qwen2_5_3b", [f"workflow={name}"], RECIPE / "config")
    machine = Machine((80 * 10**9,) * int(gpus))
    monkeypatch.setattr(defaults, "liger_is_installed", lambda: True)  # as with requirements-gpu.lock
    monkeypatch.setenv("MODEL_PATH", str(write_config(tmp_path, QWEN[model.lower()])))
    decision = decide(config, load_workflow(ROOT / "workflows" / name), machine)
    (pool,) = decision.memory
    assert pool.fits and decision.offload == (offload != "none")
    assert decision.tokens == (32768 if model == "0.5B" else 16384)
    assert [f"{phase.used / 1e9:.1f}" for phase in pool.phases[:3]] == [rollout, backward, step]
    assert (f"{pool.host / 1e9:.1f}" if pool.host else "-") == host


def test_the_table_has_the_models_that_are_measured():
    assert {row[0] for row in ROWS} >= {"0.5B", "1.5B", "3B"} and {row[1] for row in ROWS} == {"1", "3"}
