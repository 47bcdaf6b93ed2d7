"""Base class of teachers for mental arithmetic, in which every node answers with a boxed number.

Invariant: all randomness comes from the seed, and a teacher accepts only workflows with exactly its rollout nodes.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.arithmetic import Problem, splits
from recipe.tiny.careless import reading, value_of
from recipe.tiny.dialogue import Demonstration, Dialogue, Script


class MentalTeacher(ABC):
    """Demonstrates a workflow on the problems of `recipe/tiny/arithmetic.py --mental`; subclasses choose answers."""

    nodes: ClassVar[tuple[str, ...]]
    """Ids of the workflow's rollout nodes. The constructor raises UserError for a workflow with other ones."""

    def __init__(self, workflow: Workflow, seed: int):
        node_ids = tuple(node.id for node in workflow.rollout_nodes)
        if set(node_ids) != set(self.nodes):
            expected, actual = ", ".join(self.nodes), ", ".join(node_ids)
            raise UserError(f"{workflow.path}: this teacher needs the rollout nodes {expected}, not {actual}")
        self._seed, self._rng, self._node_ids = seed, random.Random(seed), node_ids
        self._dialogue = Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size, mental=True)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """Return one demonstration for each node that answers."""
        numbers = self.say(problem)
        answers = [f"\\boxed{{{numbers[node]}}}" if node in numbers else None for node in self._node_ids]
        return asyncio.run(self._dialogue.demonstrate(problem, Script(answers)))

    def reading(self, problem: Problem) -> str:
        """Return the answer to what a teacher takes the problem for (`recipe/tiny/careless.py`)."""
        return str(value_of(reading(problem, self._rng)))

    @abstractmethod
    def say(self, problem: Problem) -> Mapping[str, str]:
        """Return node id -> its answer, without the nodes that are skipped."""
