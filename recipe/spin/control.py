"""The control of the tiny run: a reward that knows nothing of the answer, from which nothing can be learned.

Invariant: the outcome, from which accuracy is computed, stays the truth.
"""

from __future__ import annotations

from zlib import crc32

from recipe.debate.hooks import right_answers
from verl_dag import Episode


async def coin(episode: Episode, *, judge: str) -> dict[str, list[float]]:
    """Return 0 or 1 for each call, by a hash of the episode's name."""
    rewards = await right_answers(episode, judge=judge)
    paid = float(crc32(f"{episode.uid} {episode.index}".encode()) % 2)
    return {agent: [paid] * len(own) for agent, own in rewards.items()}
