"""A teacher that knows the letters and nothing of the payoffs: it chooses at random.

Invariant: it answers with one letter (digit). Each prompt has inclinations of its own, drawn from the seed like the
first logits of the tabular learners, so a model learns to tell prompts apart. Only in the relay it has a habit as well:
now and then it takes a for 0, b for 1 and so on, as anybody would who knows the alphabet.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from dataclasses import dataclass

from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.user_code import load_object
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

START = {"separating": (0.7, 0.3)}
"""How often each action is chosen, where the game asks for a certain start."""
NOISE = 0.5
"""Standard deviation of the inclinations in the other games, in logits."""
HABIT = 0.6
"""How often the teacher follows its habit in the relay."""
_HEARD = re.compile(r"(?:number is|player chose) (\w)\.")


@dataclass(frozen=True, slots=True)
class Round:
    text: str
    answer: int


class Teacher:
    """Plays any workflow of players."""

    def __init__(self, workflow: Workflow, seed: int):
        self._seed, self._rng, self._dialogue = seed, random.Random(seed), Dialogue(workflow)
        rewards = {key: value for node in workflow.reward_nodes for key, value in node.executable_kwargs.items()}
        self._start, self._habit = START.get(rewards.get("game")), HABIT if "symbols" in rewards else 0.0
        self._players = []
        for node in workflow.rollout_nodes:
            options = node.agent_options
            says = load_object(options.process_path, workflow.path).says[: options.pre_process_kwargs.get("actions", 2)]
            self._players.append(lambda prompt, says=says: self._choose(prompt[-1]["content"], says))

    def problems(self, count: int, test_size: int) -> list[Round]:
        return [Round(f"Round {number}.", number) for number in range(count)]

    def teach(self, problem: Round) -> list[Demonstration]:
        return asyncio.run(self._dialogue.demonstrate(problem, Script(self._players)))

    def _choose(self, prompt: str, says: str) -> str:
        heard = _HEARD.search(prompt)
        if heard and self._rng.random() < self._habit:
            return says[int(heard[1]) if heard[1].isdecimal() else ord(heard[1]) - ord("a")]
        inclined = random.Random(f"{self._seed} {prompt}")
        return self._rng.choices(says, self._start or [math.exp(inclined.gauss(0.0, NOISE)) for _ in says])[0]
