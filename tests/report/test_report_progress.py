from __future__ import annotations

import io
import threading

import pytest

from recipe.dag.report import progress as module
from recipe.dag.report.display import Display
from recipe.dag.report.progress import Progress, TrainingPass, TrainingPasses


def test_disabled_it_only_counts(make_episode, fault, terminal):
    with Progress(2, display=Display(terminal), enabled=False) as progress:
        progress.update(make_episode(fault=fault))
    assert (progress.done, progress.faults, terminal.getvalue()) == (1, 1, "")


def test_lines_go_on_while_nothing_finishes(make_episode, fault, lines):
    stream = lines(wanted=3)
    with Progress(5, "step 7", display=Display(stream, interval_s=0.02), running=lambda: 2) as progress:
        progress.update(make_episode(fault=fault))
        assert stream.enough.wait(timeout=60)
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("step 7: 1/5 in ") and "2 running, 1 fault, " in last


def test_a_hung_step_says_for_how_long(make_episode):
    progress = Progress(4, "rollout", display=Display(io.StringIO()))
    progress.update(make_episode())
    soon, late = progress.line(progress._last + 5), progress.line(progress._last + 60)
    assert "3 running, 0 faults" in soon and "nothing finished" not in soon
    assert late.endswith("nothing finished for 60 s")


def test_a_terminal_shows_how_many_are_done(make_episode, terminal):
    display = Display(terminal)
    with Progress(2, "step 1", display=display) as progress:
        progress.update(make_episode())
        display._live.refresh()
        shown = terminal.getvalue()
    assert "step 1" in shown and "1/2" in shown and "1 running" in shown
    assert progress.fraction(0.0) == 0.5


def test_updates_from_many_threads_all_count(make_episode):
    progress = Progress(400, display=Display(io.StringIO()))
    episode = make_episode()
    threads = [threading.Thread(target=lambda: [progress.update(episode) for _ in range(50)]) for _ in range(8)]
    with progress:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert progress.done == 400


def test_a_first_pass_claims_no_share():
    first = TrainingPass("update of main", 700_000, None)
    assert first.fraction(first.started + 5) is None
    assert first.line(first.started + 5) == (
        "update of main: 5 s, 700k tokens, first pass: kernels may compile, speed not known yet"
    )


def test_a_later_pass_is_estimated_from_the_last_one_until_it_takes_longer():
    later = TrainingPass("update of main", 10_000, 1000.0)
    assert later.fraction(later.started + 4) == pytest.approx(0.4)
    assert later.line(later.started + 4) == (
        "update of main: 4 s, about 40% of 10.0k tokens, at the last pass's 1.0k tokens/s"
    )
    assert later.fraction(later.started + 11) is None
    assert later.line(later.started + 11).endswith("10.0k tokens, longer than at the last pass's 1.0k tokens/s")


def test_work_without_tokens_shows_its_clock_alone():
    work = TrainingPass("advantages of main", None, None)
    assert work.line(work.started + 12) == "advantages of main: 12 s"


@pytest.fixture
def speeds_of(monkeypatch):
    """The speed that each pass of a run is shown with; every pass counts, however short."""
    shown: list[float | None] = []

    class Recorded(TrainingPass):
        def __init__(self, label, tokens, speed, **keys):
            shown.append(speed)
            super().__init__(label, tokens, speed, **keys)

    monkeypatch.setattr(module, "TrainingPass", Recorded)
    monkeypatch.setattr(module, "SHORT_S", 0.0)
    return shown


def test_a_pass_is_compared_with_the_last_one_of_its_kind_that_succeeded(speeds_of):
    passes = TrainingPasses(display=Display(io.StringIO()))
    with passes.show("step 1: update of a", 100, kind="update of a"):
        pass
    with passes.show("step 1: update of b", 100, kind="update of b"):
        pass
    with pytest.raises(RuntimeError), passes.show("step 2: update of a", 10**9, kind="update of a"):
        raise RuntimeError
    with passes.show("step 3: update of a", 100, kind="update of a"):
        pass
    assert speeds_of[:2] == [None, None] and speeds_of[2] == speeds_of[3] and speeds_of[2] > 0


def test_a_pass_that_found_nothing_to_do_says_nothing_of_speed(speeds_of, monkeypatch):
    monkeypatch.setattr(module, "SHORT_S", 1.0)
    passes = TrainingPasses(display=Display(io.StringIO()))
    for _ in range(2):
        with passes.show("values of a", 100, kind="values of a"):
            pass
    assert speeds_of == [None, None]
