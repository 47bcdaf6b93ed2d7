"""A careless teacher of pioneer and observer.

Invariant: the teacher keeps the format and gets the content wrong at fixed rates: what it gets right by chance is what
reinforcement learning must find. Its observer errs by repeating what it heard.
"""

from __future__ import annotations

import asyncio
import random

from preprocess.arithmetic import Problem, splits
from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue

WRONG_FIRST, REPEATED = 0.5, 0.5
"""How often the pioneer writes down a number of the problem, and the observer what the pioneer said."""

NODES = ("pioneer", "observer")


class Teacher:
    """Walks problems of `preprocess/arithmetic.py --mental` through workflow_cory. Raises UserError for another."""

    def __init__(self, workflow: Workflow, seed: int):
        found = tuple(node.node_id for node in workflow.rollout_nodes)
        if found != NODES:
            raise UserError(f"{workflow.path}: the teacher knows the nodes {', '.join(NODES)}, not {', '.join(found)}")
        self._seed, self._rng = seed, random.Random(seed)
        self._dialogue = Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size, mental=True)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each of the two."""
        truth = problem.answer
        first = self._rng.choice(problem.operands) if self._rng.random() < WRONG_FIRST else truth
        second = first if self._rng.random() < REPEATED else truth
        answers = [f"\\boxed{{{said}}}" for said in (first, second)]
        return asyncio.run(self._dialogue.demonstrate(problem, answers))
