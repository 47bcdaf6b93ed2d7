"""A budget of an API policy that runs out in the middle of a run, whose episodes two processes play."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import TWO_STEPS, episodes_of, finish, log_of, start, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WORKFLOW = """\
dag_id: budget
agents:
  - {name: solver, policy: main, sampling: {max_tokens: 8}}
  - {name: coach, policy: outside}
policies:
  main: {model: {path: "${oc.env:MODEL_PATH}"}}
  outside: {api: {script: "coach.py:judge", price: {input: 1.0, output: 1.0}, budget: {calls: 24}}}
nodes:
  - {id: solve, agent: solver}
  - {id: ask, agent: coach, after: solve}
  - {id: score, reward: "coach.py:score", after: ask}
"""
CODE = """
def judge(messages):
    return str(len(messages[-1]["content"]) % 3)
def score(episode):
    return {"solver": float(episode.calls[1].text), "coach": 0.0}
"""
PROCESSES = "rollout.processes=2"


def spent(out: Path) -> float:
    return json.loads((out / "api_usage.json").read_text())["outside"]["calls"]


def test_a_spent_budget_ends_the_run_and_a_larger_one_goes_on(material, tmp_path):
    (tmp_path / "coach.py").write_text(CODE)
    workflow = tmp_path / "workflow.yaml"
    workflow.write_text(WORKFLOW)
    out = tmp_path / "run"
    run = start(material, out, *TWO_STEPS, PROCESSES, workflow=workflow)
    assert run.wait(timeout=1200) == 2, log_of(out)[-4000:]
    (error,) = [line for line in log_of(out).splitlines() if line.startswith("error: ")]
    assert error.startswith("error: policy outside: its budget of 24 calls is spent (24 calls); raise policies.outside")
    assert "Traceback" not in log_of(out)
    assert list(steps(out)) == [1] and spent(out) == 24  # a step is 16 calls; the processes share the other 8
    assert steps(out)[1]["policy/outside/api/budget_left"] == pytest.approx(8 / 24)
    stored = json.loads((out / "checkpoints" / "global_step_1" / "run.json").read_text())
    assert stored["api_usage"]["outside"]["calls"] == 16
    again = start(
        material, out, *TWO_STEPS, PROCESSES, "workflow.policies.outside.api.budget.calls=40", workflow=workflow
    )
    metrics = finish(again, out)
    assert list(metrics) == [1, 2] and "resumed from" in log_of(out) and spent(out) == 40
    assert metrics[2]["policy/outside/api/budget_left"] == 0.0  # not one call too many
    assert all(episode["fault"] is None for episode in episodes_of(out)) and len(episodes_of(out)) == 32
