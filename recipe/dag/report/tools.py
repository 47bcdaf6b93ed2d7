"""Tool statistics from episode records.

Invariant: a call is successful only if the tool reported success. Code that failed, timed out, was rejected or could
not be run is a failure, each under its own name in `errors`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from recipe.dag.episode.toolset import REFUSED
from recipe.dag.types.record import Call, Episode, ToolResult

EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?::|$)")
"""Matches the last line of a Python traceback; the group is the exception's name."""


def tool_metrics(episodes: Iterable[Episode]) -> dict[str, Any]:
    """Return statistics per tool, and their sums; latencies in seconds. Episodes with a fault count: their tools ran.

    {"tools": {name: {total_calls, successful_calls, failed_calls, total_latency, avg_latency, errors: {type: count}}},
    "summary": {total, successful, failed, tools_count}}
    """
    results: dict[str, list[ToolResult]] = defaultdict(list)
    for episode in episodes:
        for call in episode.all_calls:
            for result in call.tool_results:
                results[result.name].append(result)
    tools = {name: _statistics(results[name]) for name in sorted(results)}
    return {
        "tools": tools,
        "summary": {
            "total": sum(tool["total_calls"] for tool in tools.values()),
            "successful": sum(tool["successful_calls"] for tool in tools.values()),
            "failed": sum(tool["failed_calls"] for tool in tools.values()),
            "tools_count": len(tools),
        },
    }


def tool_rates(calls: Iterable[Call]) -> dict[str, float]:
    """Return flat metrics per tool, `tool/<name>/...`; {} without tool calls.

    calls: those that ran; errors: of these, the ones that failed, timed out or could not be run; retried: of these, the
    ones that the infrastructure made repeat; rejected: calls that did not run, since their arguments were unreadable or
    refused; seconds, waited: means over those that ran, of the running time and of the time before it. Names that are
    no tool's are models' inventions, and are counted together as `tool/unknown/rejected`.
    """
    results = [result for call in calls for result in call.tool_results]
    known = {result.name for result in results if result.status != "invalid" or result.text.startswith(REFUSED)}
    groups: dict[str, list[ToolResult]] = defaultdict(list)
    for result in results:
        groups[result.name if result.name in known else "unknown"].append(result)
    metrics: dict[str, float] = {}
    for name in sorted(groups):
        ran = [result for result in groups[name] if result.status != "invalid"]
        values: dict[str, float] = {"rejected": len(groups[name]) - len(ran)}
        if name in known:
            values = {
                "calls": len(ran),
                "errors": sum(not result.ok for result in ran),
                "retried": sum(result.attempts > 1 for result in ran),
                **values,
            }
        if ran:
            values["seconds"] = fmean(result.seconds for result in ran)
            values["waited"] = fmean(result.waited for result in ran)
        metrics |= {f"tool/{name}/{key}": value for key, value in values.items()}
    return metrics


def error_type(result: ToolResult) -> str:
    """Return the name of the exception if the code failed with one, else the status."""
    lines = result.stderr.strip().splitlines()
    match = EXCEPTION.match(lines[-1].strip()) if lines and result.status == "failed" else None
    return match.group(1) if match else result.status


def _statistics(results: list[ToolResult]) -> dict[str, Any]:
    latency = sum(result.seconds for result in results)
    errors = Counter(error_type(result) for result in results if not result.ok)
    return {
        "total_calls": len(results),
        "successful_calls": len(results) - errors.total(),
        "failed_calls": errors.total(),
        "total_latency": latency,
        "avg_latency": latency / len(results),
        "errors": dict(sorted(errors.items())),
    }
