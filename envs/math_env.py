"""A mathematics environment: the last agent answers, and all agents see whether the answer was right.

Invariant: the reward is 1.0 or 0.0, the grader's verdict on the last box of the last action; if grading fails,
GraderFault is raised. The ground truth is never part of an observation.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.reward.answer import extract_answer
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.grader import grade

RIGHT = "This led to the right answer."
WRONG = "This did not lead to the right answer."


@earned_by(boxed_answer_is_right)
class MathEnv:
    """Grades the last agent's boxed answer and pays that agent. `grade_timeout_s`: limit of one comparison."""

    def __init__(self, grade_timeout_s: float = 10.0) -> None:
        self._grade_timeout_s = grade_timeout_s

    def reset(self, sample: dict[str, Any], seed: int) -> None:
        """Start an episode, without an observation. Raises UserError for a sample without a ground truth."""
        if sample.get("ground_truth") is None:
            raise UserError("MathEnv: a sample has no ground truth; the data needs reward_model.ground_truth")

    async def step(self, actions: list[str], ground_truth: Any) -> tuple[list[str], list[float], bool]:
        """Return (observations, rewards, done): each player sees its text and the verdict, the last player gets the
        reward, and the episode is done if the answer is right. Raises GraderFault."""
        answer = extract_answer(actions[-1])
        solved = answer is not None and await grade(answer, str(ground_truth), timeout_s=self._grade_timeout_s)
        verdict = RIGHT if solved else WRONG
        rewards = [0.0] * (len(actions) - 1) + [float(solved)]
        return [f"{action}\n\n{verdict}" for action in actions], rewards, solved
