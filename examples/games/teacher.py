"""A teacher that knows the letters and nothing of the game: it chooses at random.

Invariant: all that a tiny model learns from it is to answer with one letter.
"""

from __future__ import annotations

import asyncio
import random

from preprocess.arithmetic import Problem, splits
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue


class Teacher:
    """Plays any workflow of players; the problems are only a reason to play."""

    def __init__(self, workflow: Workflow, seed: int):
        self._seed, self._rng, self._dialogue = seed, random.Random(seed), Dialogue(workflow)
        kwargs = [node.agent_options.pre_process_kwargs for node in workflow.rollout_nodes]
        self._actions = [options.get("actions", 2) for options in kwargs]

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        answers = ["abc"[self._rng.randrange(actions)] for actions in self._actions]
        return asyncio.run(self._dialogue.demonstrate(problem, answers))
