"""The control of the tiny run: a reward that knows nothing of the answer, so that nothing can be learned from it."""

from __future__ import annotations

from zlib import crc32

from verl_dag import Episode


def coin(episode: Episode) -> dict[str, float]:
    """Return 0 or 1 for the solver, by a hash of the episode's name; the outcome stays the truth."""
    answer = episode.calls[0]
    episode.outcome = float(answer.parsed is not None and answer.parsed.get("answer") == episode.ground_truth)
    return {answer.agent: float(crc32(f"{episode.uid} {episode.index}".encode()) % 2)}
