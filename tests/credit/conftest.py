from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from recipe.dag.types.row import Row


def build_row(
    reward: float,
    *,
    uid: str = "u",
    episode: int = 0,
    agent: str = "solver",
    node: str = "solve",
    turn: int = 0,
    policy: str = "main",
    mask: tuple[int, ...] = (1, 1, 0, 1),
    position: int | None = None,
) -> Row:
    tokens = ([1], [7] * len(mask), list(mask), [-0.5 * bit for bit in mask])
    positions = () if position is None else (position,)
    return Row(uid, episode, agent, node, turn, policy, 0, *tokens, reward, call_positions=positions)


def merge_rows(rows: list[Row]) -> Row:
    """Return the rows of one agent in one episode as one merged row."""
    ends, end = [], 0
    for row in rows:
        end += len(row.response_ids)
        ends.append(end)
    return replace(
        rows[0],
        response_ids=[token for row in rows for token in row.response_ids],
        response_mask=[bit for row in rows for bit in row.response_mask],
        rollout_log_probs=[value for row in rows for value in row.rollout_log_probs],
        reward=sum(row.reward for row in rows),
        call_ends=tuple(ends),
        call_learns=(),
        call_rewards=tuple(row.reward for row in rows),
        call_turns=tuple(row.turn for row in rows),
        call_positions=tuple(position for row in rows for position in row.call_positions),
    )


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Row]:
    return build_row


@pytest.fixture(scope="session")
def merge() -> Callable[[list[Row]], Row]:
    return merge_rows


@pytest.fixture(autouse=True)
def _alone(one_thread):
    """Run every test here with one thread."""
