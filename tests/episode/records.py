"""Reads records back and finds calls."""

from __future__ import annotations

from typing import Any

from recipe.dag.types.record import Call, Episode, Result, Skip, ToolResult


def episode_from_json(data: dict[str, Any]) -> Episode:
    """Return the episode that `Episode.to_json` wrote, also in a version without results and skips."""
    calls = [
        Call(**{**call, "tool_results": [ToolResult(**r) for r in call["tool_results"]]}) for call in data["calls"]
    ]
    results = [Result(**result) for result in data.get("results", ())]
    skips = [Skip(**skip) for skip in data.get("skips", ())]
    return Episode(**{**data, "calls": calls, "results": results, "skips": skips})


def call_at(episode: Episode, node: str) -> Call:
    """Return the latest call of a node."""
    return next(call for call in reversed(episode.calls) if call.node == node)
