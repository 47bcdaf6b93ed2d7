"""A teacher that knows the letters and nothing of the game: it chooses at random.

Invariant: all that a tiny model learns from it is to answer with one letter (digit), each as likely as START says.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.user_code import load_object
from recipe.tiny.dialogue import Demonstration, Dialogue

START = {"separating": (0.7, 0.3)}
"""How often each action is chosen, by game; equally often in the others."""


@dataclass(frozen=True, slots=True)
class Round:
    text: str
    answer: int


class Teacher:
    """Plays any workflow of players."""

    def __init__(self, workflow: Workflow, seed: int):
        self._rng, self._dialogue = random.Random(seed), Dialogue(workflow)
        game = next((node.executable_kwargs.get("game") for node in workflow.reward_nodes), None)
        self._moves = []
        for node in workflow.rollout_nodes:
            options = node.agent_options
            says = load_object(options.process_path, workflow.path).says[: options.pre_process_kwargs.get("actions", 2)]
            self._moves.append((says, START.get(game)))

    def problems(self, count: int, test_size: int) -> list[Round]:
        return [Round(f"Round {number}.", number) for number in range(count)]

    def teach(self, problem: Round) -> list[Demonstration]:
        answers = [self._rng.choices(says, weights)[0] for says, weights in self._moves]
        return asyncio.run(self._dialogue.demonstrate(problem, answers))
