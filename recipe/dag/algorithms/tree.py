"""Credit of candidates: the scores of siblings beside the return of the episode that goes on from one of them.

Invariant: a candidate's score is compared with other candidates' scores alone, and an episode's return with other
episodes' returns alone; the two advantages are added. A candidate that was not kept has the first only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.blocks import Block
from recipe.dag.algorithms.facts import Facts
from recipe.dag.core.problem import Problem


class Tree(Block):
    """Weights of the two advantages of a candidate (`nodes[].candidates`): its score against those of other candidates,
    and, for the one that was kept, the advantage of the episode. Without this block, its defaults apply."""

    source: ClassVar[str] = "AT-GRPO, arXiv 2510.11062; shaping: MARS2 (MARTI)"
    assumes: ClassVar[str] = "a node with `candidates`; an estimator that compares episodes, or none; no critic"

    local: float = Field(default=1.0, gt=0.0)
    """Weight of the score's advantage."""
    later: float = Field(default=1.0, ge=0.0)
    """Weight of the episode's advantage for the candidate that was kept; 0: its score alone counts, as in AT-GRPO."""
    compare: Literal["siblings", "sample"] = "siblings"
    """siblings: candidates of one prompt. sample: all candidates of the agent in all episodes of the sample."""
    scale: Literal["std", "none"] = "none"
    """std: divide the score's advantage by the standard deviation of the compared scores."""
    gamma: float = Field(default=0.0, ge=0.0)
    """Shaping: each score s becomes s + gamma (s - b) before it is compared, with the baseline b = (1 - lam) times the
    score of its parent, the candidate that was kept before, plus lam times the mean of its siblings; the one that
    exists, if the other does not. Needs `compare: sample`."""
    lam: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the siblings in the baseline of the shaping."""

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        if self.gamma > 0 and self.compare == "siblings":
            message = (
                "among siblings, which have one parent, the shaping only multiplies their differences; use `local` for "
                "that, or `compare: sample`"
            )
            yield facts.problem(("algorithm", "tree", "gamma"), message, key=True)
        if self.gamma == 0 and facts.has("algorithm", "tree", "lam"):
            yield facts.problem(("algorithm", "tree", "lam"), "only the shaping reads this; set `gamma`", key=True)

    def check(self, facts: Facts) -> Iterator[Problem]:
        trained = {agent.name for agent in facts.trained_agents}
        if not any(node.candidates and facts.agent_of[node.id] in trained for node in facts.nodes):
            message = "no node of a trained agent has `candidates`, so this has no effect; remove it"
            yield facts.problem(("algorithm", "tree"), message, key=True)
