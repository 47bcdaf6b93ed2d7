"""A programming problem as an env: the last agent's program is run on the sample's tests, in the sandbox.

Invariant: a reward says which tests a program passed; a sandbox that could not run one raises a SandboxFault. Inputs,
expected outputs and what a program printed are never part of an observation. Outputs are compared here, not where the
program runs: it never holds an expected output, but for tests that are asserts.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from envs.code_tests import Case, cases_of, passed, program_for
from recipe.dag.episode.markup import after_thinking
from recipe.dag.errors import UserError
from recipe.dag.tools.sandbox_client import SandboxClient

# A fence without its closing one reaches to the end: the generation was cut off.
_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "py", "python", "python3")
NO_PROGRAM = "There was no program in a ```python block."


class CodeEnv:
    """reward: share (of the tests that pass), or all (1.0 or 0.0). timeout_s: of one test. max_tests: the first so many
    of a sample's tests are run; None: all. max_timeouts: after so many tests that ran out of time the others count as
    failed, so that an endless loop costs a bounded time. wave: tests sent to the sandbox at once."""

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
        """There is nothing to see before the first program. Raises UserError for a sample without tests that can be
        run."""
        self._sandbox = sandbox
        cases_of(sample.get("ground_truth"))

    async def step(self, actions: list[str], ground_truth: Any) -> tuple[list[str], list[float], bool]:
        """(what each player did and how many tests passed, the reward for the last player and 0.0 for the others,
        whether all passed). Raises SandboxFault."""
        cases = cases_of(ground_truth)[: self._max_tests]
        code = program_in(actions[-1])
        if code is None:
            verdict, right = NO_PROGRAM, 0
        else:
            results = await self._run(code, cases)
            verdict, right = _verdict(results), results.count("passed")
        solved = right == len(cases)
        reward = float(solved) if self._all else right / len(cases)
        rewards = [0.0] * (len(actions) - 1) + [reward]
        return [f"{action}\n\n{verdict}" for action in actions], rewards, solved

    async def _run(self, code: str, cases: Sequence[Case]) -> list[str]:
        """passed | wrong | crashed | timeout, per test."""
        results: list[str] = []
        for start in range(0, len(cases), self._wave):
            if results.count("timeout") >= self._max_timeouts:
                return results + ["timeout"] * (len(cases) - len(results))
            tests = [asyncio.create_task(self._test(code, case)) for case in cases[start : start + self._wave]]
            try:
                results += await asyncio.gather(*tests)
            finally:
                # A fault of one test leaves the others running.
                for test in tests:
                    test.cancel()
                await asyncio.gather(*tests, return_exceptions=True)
        return results

    async def _test(self, code: str, case: Case) -> str:
        marker = secrets.token_hex(8)
        program, stdin = program_for(code, case, marker)
        result = await self._sandbox.run_code(
            program, stdin=stdin, timeout_s=self._timeout_s, memory_mb=self._memory_mb
        )
        if result.status != "success":
            return "timeout" if result.status == "timeout" else "crashed"
        return "passed" if passed(case, result.stdout, marker) else "wrong"


def program_in(text: str) -> str | None:
    """Return the last block of Python, or without a language, that is not blank; thoughts are not searched."""
    text = after_thinking(text)
    blocks = [block for language, block in _BLOCK.findall(text) if language.lower() in _PYTHON and block.strip()]
    return textwrap.dedent(blocks[-1]).strip("\n") if blocks else None


def _verdict(results: Sequence[str]) -> str:
    count = Counter(results)
    names = {"wrong": "gave a wrong result", "crashed": "ended with an error", "timeout": "ran out of time"}
    failed = "".join(f"; {count[kind]} {name}" for kind, name in names.items() if count[kind])
    return f"The program passed {count['passed']} of {len(results)} tests{failed}."
