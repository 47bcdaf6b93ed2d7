from __future__ import annotations

import io
import re
import subprocess
import time
from types import SimpleNamespace

import pytest

from recipe.dag.report.display import Display
from recipe.dag.report.phases import FIRST, Phases, StartPhase


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, `clock.now`, which only the test changes."""
    clock = SimpleNamespace(now=1_000_064.0)
    monkeypatch.setattr("recipe.dag.report.phases.time.time", lambda: clock.now)
    return clock


def test_a_log_has_one_line_for_each_phase_with_the_time_since_the_process_started(clock):
    stream = io.StringIO()
    phases = Phases(Display(stream), started=clock.now - 64)
    phases.begin("starting Ray")
    clock.now += 2
    phases.begin("loading the weights")
    phases.end()
    assert stream.getvalue().splitlines() == ["1:04 starting Ray ...", "1:06 loading the weights ..."]


def test_the_end_of_the_start_names_all_phases_with_their_seconds(clock):
    stream = io.StringIO()
    phases = Phases(Display(stream), started=clock.now - 64)
    phases.begin("starting Ray")
    clock.now += 2
    phases.begin("loading the weights")
    clock.now += 3
    whole = phases.ready()
    assert list(phases.seconds.items()) == [(FIRST, 64.0), ("starting Ray", 2.0), ("loading the weights", 3.0)]
    assert whole == sum(phases.seconds.values()) == 69
    last = stream.getvalue().splitlines()[-1]
    assert last == "1:09 ready after 69 s: imports and configuration 64, starting Ray 2.0, loading the weights 3.0"


def test_a_phase_that_comes_again_counts_once_with_all_its_seconds():
    phases = Phases(Display(io.StringIO()), started=time.time())
    for name in ("saving", "loading", "saving"):
        phases.begin(name)
    phases.end()
    phases.end()
    assert list(phases.seconds) == [FIRST, "saving", "loading"]


def test_a_terminal_gets_a_line_with_its_seconds_when_a_phase_ends(terminal):
    phases = Phases(Display(terminal), started=time.time())
    phases.begin("starting Ray")
    assert "starting Ray ..." not in terminal.getvalue()
    phases.end()
    assert re.search(r"\d:\d\d starting Ray: \d+\.\d s\n", terminal.getvalue())


@pytest.fixture
def nvcc(tmp_path):
    """Starts a process that looks like nvcc compiling `source` until its stdin is closed."""
    script, started = tmp_path / "nvcc", []
    script.write_text("#!/bin/sh\necho started\nread line\n")
    script.chmod(0o755)

    def start(source: str) -> subprocess.Popen:
        arguments = [script, "-O3", "-c", source, "-o", "kernel.cuda.o"]
        started.append(subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.communicate()


def test_a_phase_names_the_kernels_that_are_compiled(nvcc, lines):
    nvcc("/site-packages/flashinfer/data/csrc/norm.cu")
    nvcc("/root/.cache/tvm-ffi/sgl_kernel_jit_fused_rope_true_128_true_bf16_t_0a1b2c3d4e5f6789/cuda.cu")
    stream = lines(wanted=2)
    phases = Phases(Display(stream, interval_s=0.02), started=time.time())
    phases.begin("starting")
    assert stream.enough.wait(timeout=60)
    phases.end()
    assert re.fullmatch(r"starting: \d+ s, compiling fused_rope, norm", stream.getvalue().splitlines()[1])


def test_processes_are_looked_at_every_five_seconds(nvcc):
    process = nvcc("norm.cu")
    phase = StartPhase("starting")
    assert phase.state(100.0) == "compiling norm"
    process.communicate()
    assert phase.state(104.9) == "compiling norm"
    assert phase.state(105.0) == ""
