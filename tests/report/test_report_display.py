from __future__ import annotations

import io
import threading

import pytest

from recipe.dag.report.display import Activity, Display


class Half(Activity):
    def fraction(self, now: float) -> float | None:
        return 0.5

    def state(self, now: float) -> str:
        return "half of it"


def test_what_is_soon_done_prints_nothing():
    stream = io.StringIO()
    with Activity("saving", display=Display(stream)):
        pass
    assert stream.getvalue() == ""


def test_a_log_gets_whole_lines_without_control_characters(lines):
    stream = lines(wanted=3)
    with Half("update of main", display=Display(stream, interval_s=0.02)):
        assert stream.enough.wait(timeout=60)
    printed = stream.getvalue()
    assert not {"\r", "\x1b"} & set(printed)
    assert all(line.startswith("update of main: ") and line.endswith(" s, half of it") for line in printed.splitlines())


def test_no_thread_outlives_an_activity_that_fails():
    def threads() -> int:
        return [thread.name for thread in threading.enumerate()].count("progress")

    before = threads()
    with pytest.raises(RuntimeError), Activity("saving", display=Display(io.StringIO())):
        assert threads() == before + 1
        raise RuntimeError
    assert threads() == before


def test_a_terminal_shows_bars_of_all_that_is_under_way_and_is_left_clean(terminal):
    display = Display(terminal)
    with Half("update of a", display=display), Activity("update of b", display=display):
        display._live.refresh()
        shown = terminal.getvalue()
    assert "update of a" in shown and "update of b" in shown and "half of it" in shown
    assert "\x1b[2K" in terminal.getvalue()[len(shown) :]
    assert terminal.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in terminal.getvalue()[len(shown) :]


def test_a_line_printed_beside_bars_is_whole(terminal):
    display = Display(terminal)
    with Activity("update of a", display=display):
        display.print("[step] 1/2 is over")
    assert "[step] 1/2 is over\n" in terminal.getvalue()


def test_an_activity_of_unknown_length_fills_no_bar():
    activity = Activity("starting Ray", display=Display(io.StringIO()))
    assert activity.fraction(activity.started + 100) is None
    assert activity.line(activity.started + 100) == "starting Ray: 100 s"
