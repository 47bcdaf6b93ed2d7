"""A programming environment: the last agent's program is run on the sample's tests, in the sandbox.

Invariant: a reward depends only on the tests that a program passed; if the sandbox cannot run a test, SandboxFault is
raised. Inputs, expected outputs and the program's output are never part of an observation. Outputs are compared here,
outside the sandbox, so a program cannot read an expected output (except in tests that are assert statements).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from recipe.dag.core.errors import UserError
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.markup import after_thinking
from verl_dag.envs.code_tests import Case, cases_of, passed, program_for

# An unclosed fence extends to the end of the text: the generation was cut off.
_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")
NO_PROGRAM = "There was no program in a ```python block."


class CodeEnv:
    """Runs the last agent's program on the sample's tests and pays that agent.

    Options (`kwargs` of the env in the workflow):

    - reward: `share` (of the passed tests) or `all` (1.0 if every test passes, else 0.0)
    - timeout_s, memory_mb: limits of one test
    - max_tests: run only this many tests of a sample; None runs all
    - max_timeouts: after this many timeouts the remaining tests count as failed, so an endless loop costs little time
    - wave: tests that run in the sandbox at the same time
    """

    def __init__(
        self,
        reward: Literal["share", "all"] = "share",
        timeout_s: float = 6.0,
        memory_mb: int = 1024,
        max_tests: int | None = 32,
        max_timeouts: int = 2,
        wave: int = 8,
    ) -> None:
        if reward not in ("share", "all"):
            raise UserError(f"CodeEnv: reward {reward!r} is unknown; choose share or all")
        for name, value in (("max_tests", max_tests), ("max_timeouts", max_timeouts), ("wave", wave)):
            if value is not None and value < 1:
                raise UserError(f"CodeEnv: {name} {value} must be at least 1")
        self._all = reward == "all"
        self._timeout_s, self._memory_mb = timeout_s, memory_mb
        self._max_tests, self._max_timeouts, self._wave = max_tests, max_timeouts, wave
        self._sandbox: SandboxClient | None = None

    def reset(self, sample: dict[str, Any], seed: int, sandbox: SandboxClient) -> None:
        """Start an episode, without an observation. Raises UserError for a sample without usable tests."""
        self._sandbox = sandbox
        cases_of(sample.get("ground_truth"))

    async def step(self, actions: list[str], ground_truth: Any) -> tuple[list[str], list[float], bool]:
        """Return (observations, rewards, done): each player sees its text and how many tests passed, the last player
        gets the reward, and the episode is done if all tests passed. Raises SandboxFault."""
        cases = cases_of(ground_truth)[: self._max_tests]
        code = program_in(actions[-1])
        if code is None:
            verdict, passed_count = NO_PROGRAM, 0
        else:
            results = await self._run(code, cases)
            verdict, passed_count = _verdict(results), results.count("passed")
        solved = passed_count == len(cases)
        reward = float(solved) if self._all else passed_count / len(cases)
        rewards = [0.0] * (len(actions) - 1) + [reward]
        return [f"{action}\n\n{verdict}" for action in actions], rewards, solved

    async def _run(self, code: str, cases: Sequence[Case]) -> list[str]:
        """Return passed, wrong, crashed or timeout for each test."""
        results: list[str] = []
        for start in range(0, len(cases), self._wave):
            if results.count("timeout") >= self._max_timeouts:
                return results + ["timeout"] * (len(cases) - len(results))
            tests = [asyncio.create_task(self._test(code, case)) for case in cases[start : start + self._wave]]
            try:
                results += await asyncio.gather(*tests)
            finally:
                # gather does not cancel the other tests if one raises
                for test in tests:
                    test.cancel()
                await asyncio.gather(*tests, return_exceptions=True)
        return results

    async def _test(self, code: str, case: Case) -> str:
        assert self._sandbox is not None  # the engine calls reset before step
        marker = secrets.token_hex(8)
        program, stdin = program_for(code, case, marker)
        result = await self._sandbox.run_code(
            program, stdin=stdin, timeout_s=self._timeout_s, memory_mb=self._memory_mb
        )
        if result.status != "success":
            return "timeout" if result.status == "timeout" else "crashed"
        return "passed" if passed(case, result.stdout, marker) else "wrong"


def program_in(text: str) -> str | None:
    """Return the last non-blank block marked as Python or not marked at all, ignoring thoughts; None without one."""
    text = after_thinking(text)
    blocks = [block for language, block in _BLOCK.findall(text) if language.lower() in _PYTHON and block.strip()]
    return textwrap.dedent(blocks[-1]).strip("\n") if blocks else None


def programs_in(text: str) -> list[str]:
    """Return all non-blank blocks that are marked as Python, or else those that are not marked at all, in order,
    ignoring thoughts."""
    blocks = [(language.lower(), block) for language, block in _BLOCK.findall(after_thinking(text)) if block.strip()]
    marked = [block for language, block in blocks if language and language in _PYTHON]
    return [textwrap.dedent(block).strip("\n") for block in marked or [block for name, block in blocks if not name]]


def _verdict(results: Sequence[str]) -> str:
    count = Counter(results)
    names = {"wrong": "gave a wrong result", "crashed": "ended with an error", "timeout": "ran out of time"}
    failed = "".join(f"; {count[kind]} {name}" for kind, name in names.items() if count[kind])
    return f"The program passed {count['passed']} of {len(results)} tests{failed}."
