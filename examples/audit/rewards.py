"""Rewards that are too easily satisfied, each in its way."""

from __future__ import annotations

from verl_dag import Episode


def contains(episode: Episode) -> dict[str, float]:
    """Pay a text that contains the label anywhere."""
    episode.outcome = float(str(episode.sample["ground_truth"]) in episode.calls[-1].text)
    return {"solver": episode.outcome}
