"""A teacher of mental arithmetic, whose nodes each end with a number in a box.

Invariant: a teacher draws from its seed alone, and knows one workflow, by the ids of its rollout nodes.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from preprocess.arithmetic import Problem, splits
from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue, Script


class MentalTeacher(ABC):
    """Walks problems of `preprocess/arithmetic.py --mental` through a workflow with these rollout nodes; what they say
    is the subclass's. Raises UserError for another workflow."""

    nodes: ClassVar[tuple[str, ...]]

    def __init__(self, workflow: Workflow, seed: int):
        found = tuple(node.node_id for node in workflow.rollout_nodes)
        if set(found) != set(self.nodes):
            known, other = ", ".join(self.nodes), ", ".join(found)
            raise UserError(f"{workflow.path}: the teacher knows the nodes {known}, not {other}")
        self._seed, self._rng, self._order = seed, random.Random(seed), found
        self._dialogue = Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size, mental=True)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each node that speaks."""
        said = self.say(problem)
        answers = [f"\\boxed{{{said[name]}}}" if name in said else None for name in self._order]
        return asyncio.run(self._dialogue.demonstrate(problem, Script(answers)))

    @abstractmethod
    def say(self, problem: Problem) -> Mapping[str, str]:
        """The number that each node names; nodes that do not speak are left out."""
