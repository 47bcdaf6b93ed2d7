"""Makes rows, merges and splits them, and reads and changes what their calls record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recipe.dag.types.row import Row, RowCall


def build_row(
    reward: float = 0.0,
    *,
    uid: str = "u",
    episode: int = 0,
    trunk: int | None = None,
    agent: str = "solver",
    node: str = "solve",
    policy: str = "main",
    mask: Sequence[int] = (1, 1, 0, 1),
    prompt: Sequence[int] = (1,),
    response: Sequence[int] | None = None,
    log_probs: Sequence[float] | None = None,
    temperature: float = 1.0,
    turn: int = 0,
    **recorded: Any,
) -> Row:
    """Return a row of one call. Its place and its step in the episode are its turn, unless `recorded` names others."""
    facts = {"role": agent, "round": 0, "position": turn, "step": turn, "branch": "", "parts": {}} | recorded
    return Row(
        uid=uid,
        episode=episode,
        trunk=episode if trunk is None else trunk,
        policy=policy,
        weight_version=0,
        prompt_ids=list(prompt),
        response_ids=[7] * len(mask) if response is None else list(response),
        response_mask=list(mask),
        rollout_log_probs=[-0.5 * bit for bit in mask] if log_probs is None else list(log_probs),
        calls=(RowCall(agent=agent, node=node, end=len(mask), reward=reward, turn=turn, **facts),),
        temperature=temperature,
    )


def merge_rows(rows: Sequence[Row]) -> Row:
    """Return the rows of one policy in one episode as one merged row."""
    calls: list[RowCall] = []
    for row in rows:
        start = calls[-1].end if calls else 0
        calls += [replace(call, end=start + call.end) for call in row.calls]
    return replace(
        rows[0],
        response_ids=[token for row in rows for token in row.response_ids],
        response_mask=[bit for row in rows for bit in row.response_mask],
        rollout_log_probs=[value for row in rows for value in row.rollout_log_probs],
        calls=tuple(calls),
    )


def split_row(row: Row) -> list[Row]:
    """Return one row per call, as `rows_of` does without merging."""
    rows = []
    for call, (begin, end) in zip(row.calls, row.spans(), strict=True):
        # A call begins with a sampled token; the masked tokens before it belong to its prompt.
        start = row.response_mask.index(1, begin)
        rows.append(
            replace(
                row,
                prompt_ids=row.prompt_ids + row.response_ids[:start],
                response_ids=row.response_ids[start:end],
                response_mask=row.response_mask[start:end],
                rollout_log_probs=row.rollout_log_probs[start:end],
                calls=(replace(call, end=end - start),),
            )
        )
    return rows


def of_calls(row: Row, fact: str) -> tuple:
    """Return a fact of each call of the row."""
    return tuple(getattr(call, fact) for call in row.calls)


def with_calls(row: Row, **facts: Any) -> Row:
    """Return the row with these facts of each of its calls."""
    return replace(row, calls=tuple(replace(call, **facts) for call in row.calls))
