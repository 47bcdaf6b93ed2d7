from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest

from recipe.dag.report.display import Display
from recipe.dag.report.phases import FIRST, Phases


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
