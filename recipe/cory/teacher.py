"""A careless teacher of pioneer and observer.

Invariant: the teacher keeps the format and gets the content wrong at fixed rates: what it gets right by chance is what
reinforcement learning must find. Its observer errs by repeating what it heard.
"""

from __future__ import annotations

from preprocess.arithmetic import Problem
from recipe.tiny.mental import MentalTeacher

WRONG_FIRST, REPEATED = 0.5, 0.5
"""How often the pioneer writes down a number of the problem, and the observer what the pioneer said."""


class Teacher(MentalTeacher):
    """Of workflow_cory."""

    nodes = ("pioneer", "observer")

    def say(self, problem: Problem) -> dict[str, str]:
        truth = str(problem.answer)
        first = str(self._rng.choice(problem.operands)) if self._rng.random() < WRONG_FIRST else truth
        return {"pioneer": first, "observer": first if self._rng.random() < REPEATED else truth}
