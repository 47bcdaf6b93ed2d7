"""A careless teacher for a solver.

Invariant: the format is always right, and the content wrong: it reads the problem as `recipe/tiny/careless.py` says.
That leaves reinforcement learning something to improve.
"""

from __future__ import annotations

from recipe.tiny.arithmetic import Problem
from recipe.tiny.mental import MentalTeacher


class Teacher(MentalTeacher):
    """Demonstrates workflow_spin."""

    nodes = ("solve",)

    def say(self, problem: Problem) -> dict[str, str]:
        return {"solve": self.reading(problem)}
