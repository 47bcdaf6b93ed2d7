"""Role-specific rewards of one plan, one program and one review.

Invariant: every reward is a pure function of texts, the tool's success S, the graded outcome V (1, 0, or -1 for a
grader timeout in compat mode) and the coefficients, and lies in [reward_min, reward_max]. `compat` reproduces the
published ReTool-MA code; without it the rewards follow its report.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recipe.dag.core.errors import UserError
from recipe.dag.reward.answer import first_number

_WORD = re.compile(r"[a-z_]{4,}")
_FILLERS = frozenset({"please", "therefore", "problem", "output"})


class Coefficients(BaseModel):
    """Magnitudes: bonuses are added, penalties subtracted."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    planner_success_bonus: float = Field(0.4, ge=0)
    """The plan's program ran."""
    planner_failure_penalty: float = Field(0.2, ge=0)
    planner_spec_bonus: float = Field(0.4, ge=0)
    """It also printed what the plan expected."""
    executor_success_bonus: float = Field(0.6, ge=0)
    executor_failure_penalty: float = Field(0.4, ge=0)
    executor_alignment_bonus: float = Field(0.4, ge=0)
    """Multiplied by the share of the plan's words that occur in the code."""
    verifier_missed_penalty: float = Field(0.5, ge=0)
    """The verifier accepted a wrong output."""
    verifier_reject_penalty: float = Field(0.3, ge=0)
    """The verifier rejected a right output and gave a wrong answer."""
    reward_min: float = -1.0
    reward_max: float = 1.0
    compat: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Coefficients:
        if self.reward_min > self.reward_max:
            raise ValueError(f"reward_min {self.reward_min} is above reward_max {self.reward_max}")
        return self

    def clamp(self, reward: float) -> float:
        return min(max(reward, self.reward_min), self.reward_max)


def coefficients(options: dict[str, Any]) -> Coefficients:
    """Return the coefficients in a reward node's `args`. Raises UserError for the first invalid one."""
    try:
        return Coefficients(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            detail = f"unknown; the options are {', '.join(Coefficients.model_fields)}"
        else:
            detail = first["msg"].removeprefix("Value error, ")
        raise UserError(f"role_rewards: args{f'.{name}' if name else ''}: {detail}") from None


def planner_reward(c: Coefficients, *, success: bool, expected: str, stdout: str) -> float:
    if not success:
        return c.clamp(-c.planner_failure_penalty)
    return c.clamp(c.planner_success_bonus + c.planner_spec_bonus * spec_matches(expected, stdout, compat=c.compat))


def executor_reward(c: Coefficients, *, success: bool, code_plan: str, code: str) -> float:
    base = c.executor_success_bonus if success else -c.executor_failure_penalty
    return c.clamp(base + c.executor_alignment_bonus * overlap(code_plan, code))


def verifier_reward(
    c: Coefficients, *, outcome: float, success: bool, stdout: str, answer: str | None, truth: str
) -> float:
    """Return `outcome` (V) minus a penalty that depends on the program's output, if the program ran.

    A wrong answer is penalized as missed if it equals the output, and as a rejection if the output was right. `compat`
    penalizes a wrong output even if the verifier corrected it (which earns 0.5, not 1), and a right output whenever the
    outcome is not 1.
    """
    penalty = 0.0
    output_right = numbers_match(stdout, truth) if success else None
    if c.compat:
        if output_right is False:
            penalty = c.verifier_missed_penalty
        elif output_right and outcome < 1:
            penalty = c.verifier_reject_penalty
    elif success and outcome < 1:
        if answer is not None and numbers_match(answer, stdout):
            penalty = c.verifier_missed_penalty
        elif output_right:
            penalty = c.verifier_reject_penalty
    return c.clamp(outcome - penalty)


def overlap(code_plan: str, code: str) -> float:
    """Return the share (0..1) of the plan's words, of 4 or more letters and except fillers, that the code contains."""
    words = set(_WORD.findall(code_plan.lower())) - _FILLERS
    code = code.lower()
    return sum(word in code for word in words) / len(words) if words else 0.0


def spec_matches(expected: str, stdout: str, *, compat: bool) -> bool:
    """Return whether `stdout` equals the expected output, as text or (not in compat mode) as a number."""
    wanted, printed = _normalized(expected), _normalized(stdout)
    if not wanted:
        return False
    return wanted == printed or (not compat and numbers_match(expected, stdout) is True)


def numbers_match(a: str, b: str) -> bool | None:
    """Return whether the first numbers of two texts agree to 1e-6 (relative or absolute); None if one is missing."""
    x, y = first_number(a), first_number(b)
    if x is None or y is None or not math.isfinite(x) or not math.isfinite(y):
        return None
    return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-6)


def _normalized(text: str) -> str:
    return " ".join(text.lower().replace("\\boxed", "").split())
