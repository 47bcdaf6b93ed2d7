"""A careless teacher for reasoner and actor.

Invariant: the format is always right, and the content wrong: formulas as `recipe/tiny/careless.py` says, answers at a
fixed rate. That leaves reinforcement learning something to improve. The actor uses the reasoner's formula only, so both
must be right.
"""

from __future__ import annotations

import asyncio
import random

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.arithmetic import Problem, splits
from recipe.tiny.careless import ONE_OPERATION, reading, value_of
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

SLIP, WRONG_ANSWER = 0.15, 0.3
"""Rates at which the reasoner picks a random formula where it does not misread the problem, and the actor answers with
a number of the formula."""


class Teacher:
    """Demonstrates a reasoner -> actor workflow on the problems of `recipe/tiny/arithmetic.py --mental`."""

    def __init__(self, workflow: Workflow, seed: int):
        if len(workflow.rollout_nodes) != 2:
            count = len(workflow.rollout_nodes)
            raise UserError(f"{workflow.path}: this teacher needs two rollout nodes (reasoner, actor), not {count}")
        self._seed, self._rng = seed, random.Random(seed)
        self._dialogue = Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size, mental=True)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """Return one demonstration for each of the two nodes."""
        formula = reading(problem, self._rng, SLIP, ONE_OPERATION)
        value = value_of(formula)
        if self._rng.random() < WRONG_ANSWER:
            value = self._rng.choice(problem.operands)
        answers = [formula, f"\\boxed{{{value}}}"]
        return asyncio.run(self._dialogue.demonstrate(problem, Script(answers)))
