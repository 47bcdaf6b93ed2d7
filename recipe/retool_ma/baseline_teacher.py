"""A careless teacher for the baselines: one agent, with the interpreter in a fenced tool loop or without a tool.

Invariant: it misreads problems, breaks programs and misreads outputs at the rates of the teacher of the three
agents (`recipe/retool_ma/teacher.py`), so that the runs start from equally good demonstrations.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.retool_ma.teacher import BROKEN_CODE, SLIP, WRONG_ANSWER, run
from recipe.tiny.arithmetic import Problem, splits
from recipe.tiny.careless import reading, value_of
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

ERROR = "SyntaxError: '(' was never closed"


class Teacher:
    """Demonstrates a workflow of one rollout node. Raises UserError for others."""

    def __init__(self, workflow: Workflow, seed: int):
        nodes = workflow.rollout_nodes
        if len(nodes) != 1:
            raise UserError(f"{workflow.path}: this teacher needs one rollout node, not {len(nodes)}")
        loop = workflow.agent_of(nodes[0]).tool_loop
        if loop is not None and loop.format != "fenced":
            raise UserError(f"{workflow.path}: this teacher writes fenced programs; set tool_loop.format to fenced")
        self.seed, self.rng, self.uses_tool = seed, random.Random(seed), loop is not None
        self.dialogue = Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self.seed, count, test_size)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """Return the answer in words; with a tool, the program and the answer that follows its output."""
        formula = reading(problem, self.rng, SLIP)
        output = str(value_of(formula))
        if not self.uses_tool:
            return self._demonstrate(problem, [f"FINAL ANSWER: \\boxed{{{output}}}"])
        broken = self.rng.random() < BROKEN_CODE
        code = f"```python\nprint({formula}{'' if broken else ')'}\n```"
        misread = broken or self.rng.random() < WRONG_ANSWER
        answer = str(self.rng.choice(problem.operands)) if misread else output
        generations = [code, f"FINAL ANSWER: \\boxed{{{answer}}}"]
        return self._demonstrate(problem, generations, run("" if broken else output, ERROR if broken else ""))

    def _demonstrate(self, problem: Problem, generations: list[str], call_tool: Any = None) -> list[Demonstration]:
        move = generations if self.uses_tool else generations[0]
        return asyncio.run(self.dialogue.demonstrate(problem, Script([move], call_tool)))
