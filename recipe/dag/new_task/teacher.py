"""Teaches a model of a million parameters the form of an answer, so that there is something to learn from on a laptop.

It knows the two numbers and often picks the wrong one. A pretrained model needs no teacher; leave this file out then.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from recipe.dag import Message
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

RIGHT = 0.6
"""How often the teacher's answer is right."""


@dataclass(frozen=True)
class Problem:
    text: str
    answer: int


class Teacher:
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
