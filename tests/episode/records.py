"""Reads records back, finds calls, and splits rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipe.dag.types.record import Call, Episode, Result, Skip, ToolResult
from recipe.dag.types.row import Row


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


def split_row(row: Row) -> list[Row]:
    """Return one row per call, as `rows_of` does without merging."""
    rows, end = [], 0
    calls = zip(
        *(row.call_ends, row.call_rewards, row.call_turns, row.call_rounds, row.call_positions),
        *(row.call_steps, row.call_branches, row.call_parts, row.call_learns, row.call_unscored, row.call_candidates),
        strict=True,
    )
    for stop, reward, turn, round_index, position, step, branch, parts, learns, unscored, candidate in calls:
        # A call begins with a sampled token; the masked tokens before it belong to its prompt.
        start = row.response_mask.index(1, end)
        rows.append(
            replace(
                row,
                turn=turn,
                prompt_ids=row.prompt_ids + row.response_ids[:start],
                response_ids=row.response_ids[start:stop],
                response_mask=row.response_mask[start:stop],
                rollout_log_probs=row.rollout_log_probs[start:stop],
                reward=reward,
                call_ends=(stop - start,),
                call_rewards=(reward,),
                call_turns=(turn,),
                round=round_index,
                call_rounds=(round_index,),
                call_positions=(position,),
                call_steps=(step,),
                call_branches=(branch,),
                call_parts=(parts,),
                call_learns=(learns,),
                call_unscored=(unscored,),
                call_candidates=(candidate,),
            )
        )
        end = stop
    return rows
