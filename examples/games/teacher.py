"""A teacher for the games that ignores the payoffs and answers with a random letter or digit.

Invariant: the action probabilities of each prompt are drawn from the seed, like the initial logits of the tabular
learners, so that the model learns to distinguish prompts. In the relay, a share of the answers follows the alphabet
instead (a is 0, b is 1, ...), which gives the players a common convention to start from.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from dataclasses import dataclass
from typing import Any

from recipe.dag.core.user_code import load_object
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

START = {"separating": (0.7, 0.3)}
"""Games whose action probabilities are the same for all prompts."""
NOISE = 0.5
"""Standard deviation of the logits in the other games."""
HABIT = 0.6
"""Share of the relay's answers that follow the alphabet."""
_NUMBER_OR_LETTER = re.compile(r"(?:number is|player chose) (\w)\.")


@dataclass(frozen=True, slots=True)
class Round:
    """A problem without content: the prompt names only the round."""

    text: str
    answer: int


class Teacher:
    """Demonstrates any workflow whose agents are players of `hooks.py`."""

    def __init__(self, workflow: Workflow, seed: int):
        self._seed, self._rng, self._dialogue = seed, random.Random(seed), Dialogue(workflow)
        reward_options: dict[str, Any] = {}
        for node in workflow.reward_nodes:
            reward_options |= node.args
        self._start = START.get(reward_options.get("game", ""))
        self._habit = HABIT if "symbols" in reward_options else 0.0
        self._players = []
        for node in workflow.rollout_nodes:
            assert node.hooks is not None  # every node of the games names its player
            player = load_object(node.hooks, workflow.path)
            says = player.says[: node.prompt_options.get("actions", 2)]
            self._players.append(lambda prompt, says=says: self._choose(prompt[-1]["content"], says))

    def problems(self, count: int, test_size: int) -> list[Round]:
        return [Round(f"Round {number}.", number) for number in range(count)]

    def teach(self, problem: Round) -> list[Demonstration]:
        return asyncio.run(self._dialogue.demonstrate(problem, Script(self._players)))

    def _choose(self, prompt: str, says: str) -> str:
        match = _NUMBER_OR_LETTER.search(prompt)
        if match and self._rng.random() < self._habit:
            symbol = match[1]
            return says[int(symbol) if symbol.isdecimal() else ord(symbol) - ord("a")]
        of_prompt = random.Random(f"{self._seed} {prompt}")  # the same prompt always gets the same probabilities
        weights = self._start or [math.exp(of_prompt.gauss(0.0, NOISE)) for _ in says]
        return self._rng.choices(says, weights)[0]
