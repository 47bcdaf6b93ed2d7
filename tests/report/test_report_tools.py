from __future__ import annotations

import pytest

from recipe.dag.report.metrics import rollout_metrics
from recipe.dag.report.tools import error_type, tool_metrics, tool_rates


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


def test_rates_per_tool(make_call, make_result):
    ran = [
        make_result(seconds=1.0, waited=4.0),
        make_result("failed", seconds=3.0),
        make_result("timeout", seconds=5.0),
    ]
    lost = [make_result("fault", seconds=0.0, attempts=3), make_result("invalid", text="empty_code")]
    refused = make_result("invalid", name="search", text="invalid arguments: 'query' is a required property")
    invented = [make_result("invalid", name=name, text=f"unknown tool {name!r}") for name in ("", "google")]
    calls = [make_call(tool_results=[*ran, *lost]), make_call(tool_results=[refused, *invented])]
    assert tool_rates(calls) == {
        "tool/code_interpreter/calls": 4,
        "tool/code_interpreter/errors": 3,
        "tool/code_interpreter/retried": 1,
        "tool/code_interpreter/rejected": 1,
        "tool/code_interpreter/seconds": 9 / 4,
        "tool/code_interpreter/waited": 1.0,
        "tool/search/calls": 0,
        "tool/search/errors": 0,
        "tool/search/retried": 0,
        "tool/search/rejected": 1,
        "tool/unknown/rejected": 2,
    }
    assert tool_rates([make_call()]) == {}


def test_rates_are_metrics_of_the_step_and_of_each_agent(make_call, make_episode, make_result, fault):
    coder, judge = make_call("coder", tool_results=[make_result("failed")]), make_call("judge")
    lost = make_call("judge", tool_results=[make_result("fault")])
    metrics = rollout_metrics([make_episode(calls=[coder, judge]), make_episode(calls=[lost], fault=fault)])
    assert metrics["tool/code_interpreter/calls"] == 2 and metrics["tool/code_interpreter/errors"] == 2
    assert metrics["agent/coder/tool/code_interpreter/errors"] == 1
    assert not [key for key in metrics if key.startswith("agent/judge/tool/")]
