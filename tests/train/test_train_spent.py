"""What an evaluation has spent survives its being killed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
WORKFLOW = """\
dag_id: remote
agents: [{name: solver, policy: main}]
policies: {main: {api: {script: "say.py:say", budget: {calls: 4}}}}
algorithm: {estimator: grpo}
nodes:
  - {id: solve, agent: solver}
  - {id: pay, reward: "say.py:score", after: solve}
"""
SAY = """\
import asyncio
async def say(messages):
    with open("asked", "a") as file:
        file.write("x")
    await asyncio.sleep(0 if "quick" in messages[0]["content"] else 3600)
    return "said"
def score(episode):
    return {"solver": 1.0}
"""


def start(folder: Path, python: Path) -> subprocess.Popen:
    command = [python, "-m", "recipe.dag.cli", "eval", "w.yaml", "--data", "data.parquet", "--output", "out"]
    return subprocess.Popen(
        command, cwd=folder, env={"PATH": "", "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_evaluation_that_is_repeated_does_not_spend_the_budget_again(tmp_path, zygote):
    (tmp_path / "w.yaml").write_text(WORKFLOW)
    (tmp_path / "say.py").write_text(SAY)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{word} {k}"}],
            "data_source": "t",
            "reward_model": {"style": "rule", "ground_truth": "said"},
        }
        for k, word in enumerate(["quick", "quick", "quick", "slow"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    first, usage = start(tmp_path, zygote.python), tmp_path / "out" / "api_usage.json"
    try:
        for _ in range(12_000):
            if usage.exists() and json.loads(usage.read_text())["main"]["calls"] == 4:
                break
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.05)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert first.stderr is not None
        first.stderr.close()
    again = start(tmp_path, zygote.python)
    _, said = again.communicate(timeout=900)
    assert again.returncode == 2 and "its budget of 4 calls is spent" in said
    assert (tmp_path / "asked").read_text() == "x" * 4
