"""A careless teacher for planner, executor and verifier.

Invariant: the format is always right, and the content wrong: plans as `recipe/tiny/careless.py` says, the rest at fixed
rates. That leaves reinforcement learning something to improve.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.types.record import ToolResult
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.arithmetic import Problem, splits
from recipe.tiny.careless import reading, right_formula, slipped, value_of
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

SLIP, BROKEN_CODE, WRONG_ANSWER = 0.1, 0.04, 0.04
"""Rates at which the planner picks a random formula where it does not misread the problem, the executor omits a
bracket, the verifier misreads the output."""
WRONG_PLAN_AGAIN, WRONG_REVIEW, BROKEN_CODE_OFTEN = 0.25, 0.25, 0.12
"""With revisions: error rates of later plans, of the formula that the verifier expects, and of programs."""


class Teacher:
    """Demonstrates a planner -> executor -> verifier workflow with any number of turns. Raises UserError for others."""

    def __init__(self, workflow: Workflow, seed: int):
        if len(workflow.rollout_nodes) != 3:
            count = len(workflow.rollout_nodes)
            raise UserError(
                f"{workflow.path}: this teacher needs three rollout nodes (planner, executor, verifier), not {count}"
            )
        self.seed, self.rng = seed, random.Random(seed)
        self.dialogue, self.max_turns = Dialogue(workflow), workflow.episode.max_turns

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self.seed, count, test_size)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """Return one demonstration per call of an episode."""
        return asyncio.run(self.dialogue.demonstrate(problem, *self._turns(problem)))

    def _turns(self, problem: Problem) -> Iterator[Script]:
        for turn in range(self.max_turns):
            code = (
                slipped(problem, right_formula(problem), self.rng, WRONG_PLAN_AGAIN)
                if turn
                else reading(problem, self.rng, SLIP)
            )
            broken = self.rng.random() < (BROKEN_CODE_OFTEN if self.max_turns > 1 else BROKEN_CODE)
            stdout = "" if broken else str(value_of(code))
            review = self._review(problem, code, broken) if turn + 1 < self.max_turns else ""
            revises = "REVISE" in review
            answers = [
                f'{{"reasoning": "", "code_plan": "print({code})", "expected_output": ""}}',
                f"```python\nprint({code}{'' if broken else ')'}\n```",
                review if revises else f"{review}FINAL ANSWER: \\boxed{{{self._reading(problem, stdout)}}}",
            ]
            yield Script(answers, run(stdout, self._error(code) if broken else ""))
            if not revises:
                return

    def _review(self, problem: Problem, formula: str, broken: bool) -> str:
        """Return the verifier's text before the last turn: the formula it expects, and REVISE if the plan's differs."""
        if broken:
            return "REVISE: the program failed"
        expected = slipped(problem, right_formula(problem), self.rng, WRONG_REVIEW)
        verdict = "" if expected == formula else "REVISE: another formula"
        return f"{expected}\n{verdict}"

    def _error(self, code: str) -> str:
        """Return the error message: in the sandbox's words if a next planner may read it, else shortened."""
        error = "SyntaxError: '(' was never closed"
        where = f'  File "/tmp/tmp_sandbox/tmp_program.py", line 1\n    print({code}\n         ^\n'
        return where + error if self.max_turns > 1 else error

    def _reading(self, problem: Problem, stdout: str) -> str:
        """Return the output, or a number of the problem if there is none or it is misread."""
        if stdout and self.rng.random() >= WRONG_ANSWER:
            return stdout
        return str(self.rng.choice(problem.operands))


def run(stdout: str, error: str) -> Callable[..., Awaitable[ToolResult]]:
    """Return a tool that always reports this run."""

    async def call_tool(name: str, **arguments: Any) -> ToolResult:
        if error:
            return ToolResult(name, arguments, "failed", error, stderr=error, return_code=1)
        return ToolResult(name, arguments, "success", stdout + "\n", stdout=stdout + "\n", return_code=0)

    return call_tool
