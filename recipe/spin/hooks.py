"""Scores of candidates, and the control of the tiny run.

Invariant: the episode's outcome, from which accuracy is computed, is always the truth.
"""

from __future__ import annotations

from zlib import crc32

from recipe.dag.reward.grader import grade
from recipe.debate.hooks import right_answers
from verl_dag import Context, Episode


async def right(context: Context) -> float:
    """Return 1 for a candidate with a right answer, else 0. Raises GraderFault."""
    answer = context.call.parsed.get("answer")
    return 0.0 if answer is None else float(await grade(answer, str(context.sample["ground_truth"])))


async def coin(episode: Episode, *, judge: str) -> dict[str, list[float]]:
    """Return 0 or 1 for each call, by a hash of the episode's name: a reward from which nothing can be learned."""
    rewards = await right_answers(episode, judge=judge)
    paid = float(crc32(f"{episode.uid} {episode.index}".encode()) % 2)
    return {agent: [paid] * len(own) for agent, own in rewards.items()}
