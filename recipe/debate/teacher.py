"""A careless teacher of two solvers, a debater and a judge.

Invariant: the teacher keeps the format and gets the content wrong at fixed rates: what it gets right by chance is what
reinforcement learning must find. Its debater speaks only where the solvers differ, as in the workflow.
"""

from __future__ import annotations

import asyncio
import random

from preprocess.arithmetic import Problem, splits
from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue

WRONG_SOLUTION, WRONG_DEFENCE, WRONG_JUDGEMENT = 0.5, 0.4, 0.4
"""How often a solver writes down a number of the problem, the debater defends its side blindly, the judge takes any of
the answers that it heard."""

SIDES = ("left", "right")
NODES = (*(f"solve_{side}" for side in SIDES), *(f"defend_{side}" for side in SIDES), "judge")


class Teacher:
    """Walks problems of `preprocess/arithmetic.py --mental` through workflow_debate. Raises UserError for another."""

    def __init__(self, workflow: Workflow, seed: int):
        found = tuple(node.node_id for node in workflow.rollout_nodes)
        if set(found) != set(NODES):
            raise UserError(f"{workflow.path}: the teacher knows the nodes {', '.join(NODES)}, not {', '.join(found)}")
        self._seed, self._rng, self._order = seed, random.Random(seed), found
        self._dialogue = Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size, mental=True)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each node that speaks: five where the solvers differ, else three."""
        truth = str(problem.answer)
        said = {name: self._mostly(truth, WRONG_SOLUTION, map(str, problem.operands)) for name in NODES[:2]}
        if len(set(said.values())) > 1:
            said |= {f"defend_{side}": self._mostly(truth, WRONG_DEFENCE, [said[f"solve_{side}"]]) for side in SIDES}
        said["judge"] = self._mostly(truth, WRONG_JUDGEMENT, said.values())
        answers = [f"\\boxed{{{said[name]}}}" if name in said else None for name in self._order]
        return asyncio.run(self._dialogue.demonstrate(problem, answers))

    def _mostly(self, truth: str, wrong: float, others) -> str:
        return self._rng.choice(list(others)) if self._rng.random() < wrong else truth
