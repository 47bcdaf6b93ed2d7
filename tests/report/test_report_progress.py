from __future__ import annotations

import io
import threading

import pytest

from recipe.dag.report.progress import Progress


class Lines(io.StringIO):
    """Lets a test wait until so many lines were printed."""

    def __init__(self, wanted: int):
        super().__init__()
        self.wanted, self.enough = wanted, threading.Event()

    def flush(self) -> None:
        if self.getvalue().count("\n") >= self.wanted:
            self.enough.set()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_soon_done_prints_nothing(make_episode):
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.update(make_episode())
        progress.update(make_episode())
    assert stream.getvalue() == ""


def test_disabled_it_only_counts(make_episode, fault):
    stream = Terminal()
    with Progress(2, stream=stream, enabled=False) as progress:
        progress.update(make_episode(fault=fault))
    assert (progress.done, progress.faults, stream.getvalue()) == (1, 1, "")


def test_lines_go_on_while_nothing_finishes(make_episode, fault):
    stream = Lines(wanted=3)
    with Progress(5, "step 7", stream=stream, interval_s=0.02, running=lambda: 2) as progress:
        progress.update(make_episode(fault=fault))
        assert stream.enough.wait(timeout=20)
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("step 7: 1/5 in ") and "2 running, 1 faults" in last


def test_a_hung_step_says_for_how_long(make_episode):
    progress = Progress(4, "rollout", stream=io.StringIO(), interval_s=10.0)
    progress.update(make_episode())
    soon, late = progress.line(progress._last + 5), progress.line(progress._last + 60)
    assert "3 running, 0 faults" in soon and "nothing finished" not in soon
    assert late.endswith("nothing finished for 60 s")


def test_no_thread_outlives_a_block_that_fails():
    with pytest.raises(RuntimeError), Progress(1, stream=io.StringIO()):
        assert "progress" in [thread.name for thread in threading.enumerate()]
        raise RuntimeError
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_a_terminal_shows_a_bar_and_is_left_clean(make_episode):
    stream = Terminal()
    with Progress(2, "step 1", stream=stream) as progress:
        progress.update(make_episode())
        progress._bar.refresh()
        shown = stream.getvalue()
    assert "step 1" in shown and "1/2" in shown and "1 running" in shown
    assert "\x1b[2K" in stream.getvalue()[len(shown) :]


def test_updates_from_many_threads_all_count(make_episode):
    progress = Progress(400, stream=io.StringIO())
    episode = make_episode()
    threads = [threading.Thread(target=lambda: [progress.update(episode) for _ in range(50)]) for _ in range(8)]
    with progress:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert progress.done == 400
