"""What SIGTERM and SIGINT leave behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.runs import comparable, driver_of, finish, log_of, start, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def signalled(material, run, out, number: int, ready, send=os.kill) -> str:
    """Send a signal once `ready()`, wait for the end and return the log. No process of the run outlives it."""
    deadline = time.monotonic() + 1200
    while not ready():
        assert run.poll() is None and time.monotonic() < deadline, log_of(out)[-4000:]
        time.sleep(0.02)
    driver = driver_of(material, run)
    family = psutil.Process(driver).children(recursive=True)
    send(driver, number)
    try:
        assert run.wait(timeout=1200) == 128 + number, log_of(out)[-4000:]
    finally:
        run.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    # what is dead but unread by the machine's first process is gone, too
    alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [" ".join(process.cmdline()) for process in alive]
    return log_of(out)


def whole_checkpoint(folder: Path) -> bool:
    """Whether all files of a step are there, and the tracker names it."""
    shards = [
        folder / "main" / "actor" / f"{name}_world_size_1_rank_0.pt" for name in ("model", "optim", "extra_state")
    ]
    tracker = folder.parent / "latest_checkpointed_iteration.txt"
    return all(shard.stat().st_size for shard in shards) and folder.name == f"global_step_{tracker.read_text()}"


def test_a_terminated_run_saves_the_last_step_and_goes_on_as_if_nothing_had_happened(material, whole, tmp_path):
    out = tmp_path / "terminated"
    run = start(material, out, "trainer.save_freq=100", own_ray=True)
    log = signalled(material, run, out, signal.SIGTERM, lambda: 1 in steps(out))
    last = max(steps(out))
    assert last < 3, "the run was over before it was terminated"
    kept = out / "checkpoints" / f"global_step_{last}"
    assert log.endswith(f"stopped by SIGTERM after step {last} of 3; the same command resumes from {kept}\n"), log[
        -2000:
    ]
    assert "Traceback" not in log and "SIGTERM received" not in log
    assert whole_checkpoint(kept)
    again = finish(start(material, out), out)
    assert sorted(again) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert comparable(again[step]) == pytest.approx(comparable(steps(whole)[step]), rel=1e-5, abs=1e-6), step


def test_a_signal_to_all_processes_of_a_run_ends_it_in_one_line_and_leaves_a_whole_checkpoint(material, tmp_path):
    out = tmp_path / "cancelled"
    run = start(material, out, "trainer.total_training_steps=99", "trainer.test_freq=-1", own_ray=True)
    log = signalled(material, run, out, signal.SIGTERM, lambda: "saving step 3" in log_of(out), send=os.killpg)
    *_, last = log.splitlines()
    assert "SIGTERM" in last and "the same command resumes from" in last and "Traceback" not in log, log[-4000:]
    assert whole_checkpoint(Path(last.rpartition("resumes from ")[2]))


def test_the_terminal_shows_phases_and_steps_and_the_processes_lines_are_in_files(whole):
    log = log_of(whole)
    phases = [
        "importing torch and Ray",
        "loading verl",
        "starting Ray",
        "policy main: loading",
        "its inference servers",
    ]
    at = [log.index(f"{phase}") for phase in phases]
    assert at == sorted(at) and at[-1] < log.index("ready after ") < log.index("step 1/3")
    assert "\r" not in log and "local Ray instance" not in log
    assert "local Ray instance" in (whole / "logs" / "ray.log").read_text()
    assert any(path.name != "ray.log" and path.stat().st_size for path in (whole / "logs").iterdir())
    first = min(steps(whole).values(), key=lambda line: line["step"])
    assert first["timing/startup"] > 0 and "timing/startup" not in steps(whole)[2]


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGTERM, "starting its inference servers"),
        (signal.SIGINT, "starting its inference servers"),
        (signal.SIGINT, "step 1/3"),
    ],
)
def test_an_interrupted_run_says_so_in_one_line(material, tmp_path, number, phase):
    out = tmp_path / "interrupted"
    run = start(material, out, "trainer.save_freq=-1", "trainer.val_before_train=false", own_ray=True)
    log = signalled(material, run, out, number, lambda: phase in log_of(out))
    assert log.endswith(f"interrupted ({number.name}); no checkpoint was saved\n"), log[-2000:]
    assert "Traceback" not in log
