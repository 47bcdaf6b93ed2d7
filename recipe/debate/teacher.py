"""A careless teacher for two solvers, a debater and a judge.

Invariant: the format is always right, and the content wrong: each speaker reads the problem anew, as
`recipe/tiny/careless.py` says, and errs at a fixed rate. That leaves reinforcement learning something to improve. The
debater speaks only if the solvers differ, as in the workflow.
"""

from __future__ import annotations

from collections.abc import Iterable

from recipe.tiny.arithmetic import Problem
from recipe.tiny.mental import MentalTeacher

WRONG_SOLUTION, WRONG_DEFENCE, WRONG_JUDGEMENT = 0.15, 0.4, 0.4
"""Rates at which a solver answers with a number of the problem, the debater defends its side blindly, and the judge
repeats any of the answers."""

SIDES = ("left", "right")
NODES = (*(f"solve_{side}" for side in SIDES), *(f"defend_{side}" for side in SIDES), "judge")


class Teacher(MentalTeacher):
    """Demonstrates workflow_debate: five nodes speak if the solvers differ, else three."""

    nodes = NODES

    def say(self, problem: Problem) -> dict[str, str]:
        answers = {name: self._mostly(problem, WRONG_SOLUTION, map(str, problem.operands)) for name in NODES[:2]}
        if len(set(answers.values())) > 1:
            for side in SIDES:
                answers[f"defend_{side}"] = self._mostly(problem, WRONG_DEFENCE, [answers[f"solve_{side}"]])
        return answers | {"judge": self._mostly(problem, WRONG_JUDGEMENT, answers.values())}

    def _mostly(self, problem: Problem, wrong_rate: float, alternatives: Iterable[str]) -> str:
        """Return the answer to a reading, or with probability `wrong_rate` one of the alternatives."""
        return self._rng.choice(list(alternatives)) if self._rng.random() < wrong_rate else self.reading(problem)
