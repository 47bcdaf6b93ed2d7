"""A careless teacher of reasoner and actor.

Invariant: the teacher keeps the format and gets the content wrong at fixed rates: what it gets right by chance is what
reinforcement learning must find. Its actor looks at the reasoner's formula alone, so a team is as good as both are.
"""

from __future__ import annotations

import asyncio
import random

from preprocess.arithmetic import Problem, splits
from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

WRONG_FORMULA, WRONG_ANSWER = 0.55, 0.3
"""How often the reasoner picks another formula, and the actor writes down a number of the formula."""

FORMULAS = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} // {1}", "{0} % {1}")


class Teacher:
    """Walks problems of `preprocess/arithmetic.py --mental` through a reasoner -> actor workflow."""

    def __init__(self, workflow: Workflow, seed: int):
        if len(workflow.rollout_nodes) != 2:
            nodes = len(workflow.rollout_nodes)
            raise UserError(f"{workflow.path}: the teacher knows reasoner -> actor, not {nodes} nodes")
        self._seed, self._rng = seed, random.Random(seed)
        self._dialogue = Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size, mental=True)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each of the two nodes."""
        formula = problem.expression
        if self._rng.random() < WRONG_FORMULA:
            others = [form.format(*problem.operands) for form in FORMULAS]
            formula = self._rng.choice([other for other in others if other != formula])
        value = eval(formula)  # a formula of ours, never a model's
        if self._rng.random() < WRONG_ANSWER:
            value = self._rng.choice(problem.operands)
        answers = [formula.replace(" ", ""), f"\\boxed{{{value}}}"]  # each token less is a forward less
        return asyncio.run(self._dialogue.demonstrate(problem, Script(answers)))
