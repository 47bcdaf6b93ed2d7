"""A game with a tool, and a teacher that shows a tiny model how to play it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue, Script
from verl_dag import Agent, Context, Message, ToolResult

DOORS = ("red", "green", "blue")


class Doors:
    """There is a number behind each door; the ground truth is the number to find. Each turn is one guess."""

    def reset(self, sample: dict[str, Any], seed: int) -> str:
        wanted, chance = int(sample["ground_truth"]), random.Random(seed)
        numbers = [wanted, *chance.sample([number for number in range(10) if number != wanted], 2)]
        chance.shuffle(numbers)
        self.behind: dict[str, int] = dict(zip(DOORS, numbers, strict=True))
        self.tool_state = {Open.name: {"behind": self.behind}}  # read by the engine: what the tool knows
        return f"The doors are {', '.join(DOORS)}."

    def step(self, actions: list[str], ground_truth: Any) -> tuple[str, float, bool]:
        found = self.behind.get(actions[-1]) == int(ground_truth)
        return f"It is not behind the {actions[-1]} door.", float(found), found


class Open:
    """The tool: shows the number behind one door."""

    name = "open"
    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Open a door.",
            "parameters": {"type": "object", "properties": {"door": {"enum": [*DOORS]}}, "required": ["door"]},
        },
    }

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult | str:
        return str(state["behind"][arguments["door"]])

    async def close(self) -> None: ...


class Seeker(Agent):
    """Reads the problem and what the game says."""

    def prompt(self, context: Context) -> list[Message]:
        return [{"role": "user", "content": f"{context.problem} {context.obs} Answer with a door."}]


@dataclass(frozen=True)
class Problem:
    text: str
    answer: int


class Teacher:
    """Opens one door or two; names the last one if the number is there, and else any door, so that it is wrong four
    times in nine."""

    def __init__(self, workflow: Workflow, seed: int):
        self._rng, self._dialogue = random.Random(seed), Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return [
            Problem(f"Behind which door is the {number}?", number) for number in self._rng.choices(range(10), k=count)
        ]

    def teach(self, problem: Problem) -> list[Demonstration]:
        # one agent, and the generations of its tool loop; a game that is won in the first turn has no second one
        turns = [Script([[*[self._open] * self._rng.randint(1, 2), self._name]]) for _ in range(2)]
        return asyncio.run(self._dialogue.demonstrate(problem, *turns))

    def _open(self, prompt: list[Message]) -> str:
        self._door = self._rng.choice(DOORS)
        return f"<tool_call>\n{json.dumps({'name': 'open', 'arguments': {'door': self._door}})}\n</tool_call>"

    def _name(self, prompt: list[Message]) -> str:
        """Answer after the prompt's last message, which is the tool's result."""
        wanted = re.findall(r"\d", prompt[0]["content"])[0]
        return self._door if prompt[-1]["content"] == wanted else self._rng.choice(DOORS)
