"""How the tools fared, from the episodes' records.

Invariant: a call is successful only if the tool said so. Code that ran and failed, ran out of time, was refused or
could not be run is a failure, each under its own name in `errors`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from recipe.dag.episode.record import Episode, ToolResult

EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?::|$)")
"""The last line of a Python traceback."""


def tool_metrics(episodes: Iterable[Episode]) -> dict[str, Any]:
    """{"tools": {name: {total_calls, successful_calls, failed_calls, total_latency, avg_latency, errors: {type:
    count}}}, "summary": {total, successful, failed, tools_count}}. Latencies in seconds. Faulted episodes count: their
    tools ran."""
    results: dict[str, list[ToolResult]] = defaultdict(list)
    for episode in episodes:
        for call in episode.calls:
            for result in call.tool_results:
                results[result.name].append(result)
    tools = {name: _one(results[name]) for name in sorted(results)}
    return {
        "tools": tools,
        "summary": {
            "total": sum(tool["total_calls"] for tool in tools.values()),
            "successful": sum(tool["successful_calls"] for tool in tools.values()),
            "failed": sum(tool["failed_calls"] for tool in tools.values()),
            "tools_count": len(tools),
        },
    }


def error_type(result: ToolResult) -> str:
    """The exception's name where the code failed with one, else the status."""
    lines = result.stderr.strip().splitlines()
    found = EXCEPTION.match(lines[-1].strip()) if lines and result.status == "failed" else None
    return found.group(1) if found else result.status


def _one(results: list[ToolResult]) -> dict[str, Any]:
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
