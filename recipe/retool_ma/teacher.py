"""A careless teacher of planner, executor and verifier.

Invariant: the teacher keeps the format and gets the content wrong at fixed rates: what it gets right by chance is what
reinforcement learning must find.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from preprocess.arithmetic import Problem, splits
from recipe.dag.episode.record import ToolResult
from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

WRONG_PLAN, BROKEN_CODE, WRONG_ANSWER = 0.47, 0.04, 0.04
"""How often the planner picks another formula, the executor forgets a bracket, the verifier misreads the output."""
WRONG_PLAN_AGAIN, WRONG_REVIEW, BROKEN_CODE_OFTEN = 0.25, 0.25, 0.12
"""Where there are revision rounds: of later plans, of the formulas that a verifier compares plans with, of programs."""

FORMULAS = {
    2: ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} // {1}", "{0} % {1}", "({0} + {1}) // 2"),
    3: ("{0} + {1} - {2}", "{0} * {1} + {2}", "{0} * {1} - {2}", "({0} - {2}) * {1}", "{0} + {1} + {2}"),
}


class Teacher:
    """Walks problems through a planner -> executor -> verifier workflow, with as many turns as it has. Raises UserError
    for another one."""

    def __init__(self, workflow: Workflow, seed: int):
        if len(workflow.rollout_nodes) != 3:
            nodes = len(workflow.rollout_nodes)
            raise UserError(f"{workflow.path}: the teacher knows planner -> executor -> verifier, not {nodes} nodes")
        self.seed, self.rng = seed, random.Random(seed)
        self.dialogue, self.max_turns = Dialogue(workflow), workflow.episode.max_turns

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self.seed, count, test_size)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each move, each made from the ones before it."""
        return asyncio.run(self.dialogue.demonstrate(problem, *self._turns(problem)))

    def _turns(self, problem: Problem) -> Iterator[Script]:
        for turn in range(self.max_turns):
            formula = self._formula(problem, WRONG_PLAN_AGAIN if turn else WRONG_PLAN)
            broken = self.rng.random() < (BROKEN_CODE_OFTEN if self.max_turns > 1 else BROKEN_CODE)
            code = formula.replace(" ", "")  # each token less is a forward less
            stdout = "" if broken else str(eval(code))  # a formula of ours, never a model's
            review = self._review(problem, formula, broken) if turn + 1 < self.max_turns else ""
            asks = "REVISE" in review
            answers = [
                f'{{"reasoning": "", "code_plan": "print({code})", "expected_output": ""}}',
                f"```python\nprint({code}{'' if broken else ')'}\n```",
                review if asks else f"{review}FINAL ANSWER: \\boxed{{{self._reading(problem, stdout)}}}",
            ]
            yield Script(answers, _run(stdout, self._error(code) if broken else ""))
            if not asks:
                return

    def _formula(self, problem: Problem, wrong: float) -> str:
        if self.rng.random() >= wrong:
            return problem.expression
        others = [f.format(*problem.operands) for f in FORMULAS[len(problem.operands)]]
        return self.rng.choice([formula for formula in others if formula != problem.expression])

    def _review(self, problem: Problem, formula: str, broken: bool) -> str:
        """While turns are left, the verifier writes down the formula that it expects, and sends another one back."""
        if broken:
            return "REVISE: the program failed"
        expected = self._formula(problem, WRONG_REVIEW)
        verdict = "" if expected == formula else "REVISE: another formula"
        return f"{expected.replace(' ', '')}\n{verdict}"

    def _error(self, code: str) -> str:
        """As the sandbox words it where the next plan is made from it, and in short where none is."""
        error = "SyntaxError: '(' was never closed"
        where = f'  File "/tmp/tmp_sandbox/tmp_program.py", line 1\n    print({code}\n         ^\n'
        return where + error if self.max_turns > 1 else error

    def _reading(self, problem: Problem, stdout: str) -> str:
        if stdout and self.rng.random() >= WRONG_ANSWER:
            return stdout
        return str(self.rng.choice(problem.operands))


def _run(stdout: str, error: str):
    async def call_tool(name: str, **arguments: Any) -> ToolResult:
        if error:
            return ToolResult(name, arguments, "failed", error, stderr=error, return_code=1)
        return ToolResult(name, arguments, "success", stdout + "\n", stdout=stdout + "\n", return_code=0)

    return call_tool
