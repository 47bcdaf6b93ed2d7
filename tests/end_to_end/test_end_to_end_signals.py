"""What SIGTERM and SIGINT leave behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.end_to_end.runs import comparable, finish, log_of, start, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def signalled(run, out, number: int, ready) -> str:
    """Send a signal once `ready()`, wait for the end and return the log."""
    deadline = time.monotonic() + 300
    while not ready():
        assert run.poll() is None and time.monotonic() < deadline, log_of(out)[-4000:]
        time.sleep(0.02)
    os.kill(run.pid, number)
    try:
        assert run.wait(timeout=120) == 128 + number, log_of(out)[-4000:]
    finally:
        run.kill()
    return log_of(out)


def test_a_terminated_run_saves_the_last_step_and_goes_on_as_if_nothing_had_happened(material, whole, tmp_path):
    out = tmp_path / "terminated"
    run = start(material, out, "trainer.save_freq=100")
    log = signalled(run, out, signal.SIGTERM, lambda: 1 in steps(out))
    last = max(steps(out))
    assert last < 3, "the run was over before it was terminated"
    kept = out / "checkpoints" / f"global_step_{last}"
    assert log.endswith(f"stopped by SIGTERM after step {last} of 3; the same command resumes from {kept}\n"), log[
        -2000:
    ]
    assert "Traceback" not in log and "SIGTERM received" not in log
    again = finish(start(material, out), out)
    assert sorted(again) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert comparable(again[step]) == pytest.approx(comparable(steps(whole)[step]), rel=1e-5, abs=1e-6), step


@pytest.mark.parametrize("while_it", ["starts", "trains"])
def test_an_interrupted_run_says_so_in_one_line(material, tmp_path, while_it):
    out = tmp_path / "interrupted"
    run = start(material, out, "trainer.save_freq=-1", "trainer.val_before_train=false")
    wanted = "starting its inference servers" if while_it == "starts" else "step 1/3"
    log = signalled(run, out, signal.SIGINT, lambda: wanted in log_of(out))
    assert log.endswith("interrupted (SIGINT); no checkpoint was saved\n"), log[-2000:]
    assert "Traceback" not in log
