"""A run of two policies on two machines of a Ray, each policy on both: what remains of it when a part is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

from recipe.dag.train import checkpoint
from tests.end_to_end.runs import log_of, start, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WORKFLOW = """\
dag_id: two_machines
agents:
  - {name: solver, policy: solver, sampling: {max_tokens: 8}}
  - {name: checker, policy: checker, sampling: {max_tokens: 8}}
policies:
  solver: {model: {path: "${oc.env:MODEL_PATH}"}}
  checker: {model: {path: "${oc.env:MODEL_PATH}"}}
algorithm: {estimator: grpo}
nodes:
  - {id: solve, agent: solver}
  - {id: check, agent: checker, after: solve}
  - {id: reward, reward: score.py:score, after: check}
"""
SCORE = "def score(episode): return {call.agent: len(set(call.text)) / 9 for call in episode.calls}\n"
KEYS = ["trainer.nnodes=2", "trainer.total_training_steps=99", "trainer.logger=[console]"]
KEYS += ["trainer.val_before_train=false", "trainer.test_freq=-1"]


@pytest.fixture
def machines(material, tmp_path) -> Iterator[SimpleNamespace]:
    """`.env` of a run that joins them, and the `.second` one's process."""
    first, second, open_to_all = tmp_path / "first", tmp_path / "second", {"RAY_AUTH_MODE": "disabled"}
    first.mkdir()
    second.mkdir()
    with material.zygote.ray(first, processors=2, PYTHONPATH="", **open_to_all) as address:
        with material.zygote.second_node(address, second, processors=2, PYTHONPATH="", **open_to_all) as node:
            yield SimpleNamespace(env={"RAY_ADDRESS": address, **open_to_all}, second=psutil.Process(node))


def raylet(machine: psutil.Process) -> psutil.Process:
    return next(process for process in machine.children() if process.name() == "raylet")


def a_trainer(machine: psutil.Process, material) -> psutil.Process:
    """The process that stands for a policy's on the machine: one ends with the other."""
    for process in raylet(machine).children():
        if str(material.zygote.python) in process.cmdline():
            child = psutil.Process(material.zygote.child_of(process.pid))
            if "PolicyWorker" in " ".join(child.cmdline()):
                return process
    raise AssertionError("no policy is on the second machine")


def test_a_lost_process_and_a_lost_machine_are_one_line_and_nothing_written_is_lost(material, machines, tmp_path):
    (tmp_path / "workflow.yaml").write_text(WORKFLOW)
    (tmp_path / "score.py").write_text(SCORE)
    out = tmp_path / "out"

    def lose(victim: Callable[[], psutil.Process], *, after: int) -> str:
        """Start the run, kill a part of it after a step is saved, and return its last line."""
        run = start(material, out, *KEYS, workflow=tmp_path / "workflow.yaml", **machines.env)
        deadline = time.monotonic() + 1200
        while not (out / "checkpoints" / f"global_step_{after}").exists():
            assert run.poll() is None and time.monotonic() < deadline, log_of(out)[-4000:]
            time.sleep(0.02)
        victim().kill()
        try:
            assert run.wait(timeout=1200) == 2
        finally:
            run.kill()
        return log_of(out).splitlines()[-1]

    def kept() -> str:
        """Check that the last checkpoint is whole, and return how the line about a loss has to end."""
        saved = checkpoint.find(out / "checkpoints", mode="auto", path=None)
        assert saved is not None and checkpoint.step_of(saved) in (max(steps(out)), max(steps(out)) - 1)
        checkpoint.check_intact(saved, str)
        return f"; the same command resumes from {saved} (the output of the run's processes is in {out}/logs)"

    line = lose(lambda: a_trainer(machines.second, material), after=1)
    assert line.startswith("error: a process of the run is lost (PolicyWorker, pid ") and line.endswith(kept())

    line = lose(lambda: raylet(machines.second), after=3)
    assert line.startswith("error: the machine ") and "is lost; start Ray on it again, or on another; " in line
    assert line.endswith(kept()) and sorted(steps(out))[:3] == [1, 2, 3]
    assert "Traceback" not in log_of(out) and "(raylet)" not in log_of(out)
