"""Teaches a model of a million parameters the format of an answer, so that it can learn the rest on a laptop.

The teacher's answers are one of the two numbers, often the wrong one. With a pretrained model, delete this file.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue, Script
from verl_dag import Message

RIGHT = 0.6
"""Share of the teacher's answers that are right."""


@dataclass(frozen=True)
class Problem:
    text: str
    answer: int


class Teacher:
    """Answers for both agents, in the prompts that the workflow gives them."""

    def __init__(self, workflow: Workflow, seed: int):
        self._rng, self._dialogue = random.Random(seed), Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        pairs = [self._rng.sample(range(10), 2) for _ in range(count)]
        return [Problem(f"Which is larger, {left} or {right}?", max(left, right)) for left, right in pairs]

    def teach(self, problem: Problem) -> list[Demonstration]:
        return asyncio.run(self._dialogue.demonstrate(problem, Script([self._answer, self._answer])))

    def _answer(self, prompt: Sequence[Message]) -> str:
        numbers = re.findall(r"\d", prompt[-1]["content"])[:2]
        return max(numbers) if self._rng.random() < RIGHT else min(numbers)
