"""A careless teacher for pioneer and observer.

Invariant: the format is always right, and the content wrong: both read the problem as `recipe/tiny/careless.py` says,
the pioneer errs at a fixed rate, and the observer often repeats the pioneer. That leaves reinforcement learning
something to improve.
"""

from __future__ import annotations

from recipe.tiny.arithmetic import Problem
from recipe.tiny.mental import MentalTeacher

WRONG_FIRST, REPEATED = 0.15, 0.5
"""Rates at which the pioneer answers with a number of the problem, and the observer repeats the pioneer's answer."""


class Teacher(MentalTeacher):
    """Demonstrates workflow_cory."""

    nodes = ("pioneer", "observer")

    def say(self, problem: Problem) -> dict[str, str]:
        astray = self._rng.random() < WRONG_FIRST
        first = str(self._rng.choice(problem.operands)) if astray else self.reading(problem)
        return {"pioneer": first, "observer": first if self._rng.random() < REPEATED else self.reading(problem)}
