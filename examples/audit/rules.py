"""A rule of your own for `report.monitors`: a function of an episode's record that says why it is flagged, or None."""

from __future__ import annotations

from verl_dag import Episode


def repeats_the_problem(episode: Episode) -> str | None:
    """Flag an episode whose last text contains the whole problem."""
    problem = episode.sample["prompt"][-1]["content"]
    return "the answer is the problem" if problem in episode.calls[-1].text else None
