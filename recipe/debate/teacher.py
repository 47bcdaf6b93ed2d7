"""A careless teacher of two solvers, a debater and a judge.

Invariant: the teacher keeps the format and gets the content wrong at fixed rates: what it gets right by chance is what
reinforcement learning must find. Its debater speaks only where the solvers differ, as in the workflow.
"""

from __future__ import annotations

from collections.abc import Iterable

from preprocess.arithmetic import Problem
from recipe.tiny.mental import MentalTeacher

WRONG_SOLUTION, WRONG_DEFENCE, WRONG_JUDGEMENT = 0.5, 0.4, 0.4
"""How often a solver writes down a number of the problem, the debater defends its side blindly, the judge takes any of
the answers that it heard."""

SIDES = ("left", "right")
NODES = (*(f"solve_{side}" for side in SIDES), *(f"defend_{side}" for side in SIDES), "judge")


class Teacher(MentalTeacher):
    """Of workflow_debate. Five nodes speak where the solvers differ, else three."""

    nodes = NODES

    def say(self, problem: Problem) -> dict[str, str]:
        truth = str(problem.answer)
        said = {name: self._mostly(truth, WRONG_SOLUTION, map(str, problem.operands)) for name in NODES[:2]}
        if len(set(said.values())) > 1:
            said |= {f"defend_{side}": self._mostly(truth, WRONG_DEFENCE, [said[f"solve_{side}"]]) for side in SIDES}
        return said | {"judge": self._mostly(truth, WRONG_JUDGEMENT, said.values())}

    def _mostly(self, truth: str, wrong: float, others: Iterable[str]) -> str:
        return self._rng.choice(list(others)) if self._rng.random() < wrong else truth
