from __future__ import annotations

import pytest

from recipe.dag.report.tools import error_type, tool_metrics


def test_failures_are_counted_by_type(make_call, make_episode, make_result, fault):
    trace = "Traceback (most recent call last):\n  File ...\nZeroDivisionError: division by zero\n"
    failed, late = make_result("failed", stderr=trace, seconds=2.0), make_result("timeout", seconds=3.0)
    good = [make_result(seconds=1.0), failed, late]
    lost = [make_result("fault", seconds=0.0), make_result("invalid", name="search", arguments={}, seconds=0.0)]
    episodes = [
        make_episode(calls=[make_call(tool_results=good[:1]), make_call(tool_results=good[1:])]),
        make_episode(calls=[make_call(tool_results=lost)], fault=fault),
    ]
    assert tool_metrics(episodes) == {
        "tools": {
            "code_interpreter": {
                "total_calls": 4,
                "successful_calls": 1,
                "failed_calls": 3,
                "total_latency": 6.0,
                "avg_latency": 1.5,
                "errors": {"ZeroDivisionError": 1, "fault": 1, "timeout": 1},
            },
            "search": {
                "total_calls": 1,
                "successful_calls": 0,
                "failed_calls": 1,
                "total_latency": 0.0,
                "avg_latency": 0.0,
                "errors": {"invalid": 1},
            },
        },
        "summary": {"total": 5, "successful": 1, "failed": 4, "tools_count": 2},
    }


def test_no_tools(make_episode):
    empty = {"tools": {}, "summary": {"total": 0, "successful": 0, "failed": 0, "tools_count": 0}}
    assert tool_metrics([make_episode()]) == tool_metrics([]) == empty


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("Traceback ...\nValueError: bad", "ValueError"),
        ("Traceback ...\nsympy.core.sympify.SympifyError: x", "SympifyError"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("something went wrong: badly", "failed"),
        ("", "failed"),
    ],
)
def test_error_type(make_result, stderr, expected):
    assert error_type(make_result("failed", stderr=stderr)) == expected


def test_a_timeout_is_a_timeout_whatever_it_printed(make_result):
    assert error_type(make_result("timeout", stderr="ValueError: bad")) == "timeout"
