"""A careless teacher of planner, executor and verifier.

Invariant: the teacher keeps the format and gets the content wrong at fixed rates: what it gets right by chance is what
reinforcement learning must find.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from preprocess.arithmetic import Problem, splits
from recipe.dag.episode.record import ToolResult
from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue

WRONG_PLAN, BROKEN_CODE, WRONG_ANSWER = 0.47, 0.04, 0.04
"""How often the planner picks another formula, the executor forgets a bracket, the verifier misreads the output."""

FORMULAS = {
    2: ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} // {1}", "{0} % {1}", "({0} + {1}) // 2"),
    3: ("{0} + {1} - {2}", "{0} * {1} + {2}", "{0} * {1} - {2}", "({0} - {2}) * {1}", "{0} + {1} + {2}"),
}


class Teacher:
    """Walks problems through a planner -> executor -> verifier workflow. Raises UserError for another one."""

    def __init__(self, workflow: Workflow, seed: int):
        if len(workflow.rollout_nodes) != 3:
            nodes = len(workflow.rollout_nodes)
            raise UserError(f"{workflow.path}: the teacher knows planner -> executor -> verifier, not {nodes} nodes")
        self.seed, self.rng = seed, random.Random(seed)
        self.dialogue = Dialogue(workflow)

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self.seed, count, test_size)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each rollout node, each made from the ones before it."""
        return asyncio.run(self._teach(problem))

    async def _teach(self, problem: Problem) -> list[Demonstration]:
        formula = self._formula(problem).replace(" ", "")  # each token less is a forward less
        broken = self.rng.random() < BROKEN_CODE
        stdout = str(eval(formula))  # a formula of ours, never a model's
        answers = [
            f'{{"reasoning": "", "code_plan": "print({formula})", "expected_output": ""}}',
            f"```python\nprint({formula}{'' if broken else ')'}\n```",
            f"FINAL ANSWER: \\boxed{{{self._reading(problem, '' if broken else stdout)}}}",
        ]
        return await self.dialogue.demonstrate(problem, answers, _run(broken, stdout))

    def _formula(self, problem: Problem) -> str:
        if self.rng.random() >= WRONG_PLAN:
            return problem.expression
        others = [f.format(*problem.operands) for f in FORMULAS[len(problem.operands)]]
        return self.rng.choice([formula for formula in others if formula != problem.expression])

    def _reading(self, problem: Problem, stdout: str) -> str:
        if stdout and self.rng.random() >= WRONG_ANSWER:
            return stdout
        return str(self.rng.choice(problem.operands))


def _run(broken: bool, stdout: str):
    async def call_tool(name: str, **arguments: Any) -> ToolResult:
        if broken:
            error = "SyntaxError: '(' was never closed"
            return ToolResult(name, arguments, "failed", error, stderr=error, return_code=1)
        return ToolResult(name, arguments, "success", stdout + "\n", stdout=stdout + "\n", return_code=0)

    return call_tool
