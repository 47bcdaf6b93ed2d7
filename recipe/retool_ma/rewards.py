"""Role-specific rewards: what one plan, one program and one review are worth.

Invariant: every reward is a pure function of texts, of the tool's success S, of the graded outcome V (1, 0, or -1 for a
grader timeout in compat mode) and of the coefficients, and lies in [reward_min, reward_max]. `compat` gives the values
of the published ReTool-MA code; without it the rewards mean what its report says.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recipe.dag.errors import UserError
from recipe.dag.reward.answer import first_number

_WORD = re.compile(r"[a-z_]{4,}")
_FILLERS = frozenset({"please", "therefore", "problem", "output"})


class Coefficients(BaseModel):
    """Bonuses are added and penalties subtracted, so all are given as magnitudes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    planner_success_bonus: float = Field(0.4, ge=0)
    """The plan's program ran."""
    planner_failure_penalty: float = Field(0.2, ge=0)
    planner_spec_bonus: float = Field(0.4, ge=0)
    """It also printed what the plan expected."""
    executor_success_bonus: float = Field(0.6, ge=0)
    executor_failure_penalty: float = Field(0.4, ge=0)
    executor_alignment_bonus: float = Field(0.4, ge=0)
    """Times the share of the plan's words that the code mentions."""
    verifier_missed_penalty: float = Field(0.5, ge=0)
    """The verifier let a wrong output pass."""
    verifier_reject_penalty: float = Field(0.3, ge=0)
    """The verifier gave up a right output for a wrong answer."""
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
    """From a reward node's executable_kwargs; raises a UserError that names the first wrong one."""
    try:
        return Coefficients(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            detail = f"unknown; the options are {', '.join(Coefficients.model_fields)}"
        else:
            detail = first["msg"].removeprefix("Value error, ")
        raise UserError(f"role_rewards: executable_kwargs{f'.{name}' if name else ''}: {detail}") from None


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
    """`outcome` is V. Only a program that ran can be missed or rejected.

    compat: penalises a wrong output whatever the verifier made of it (overruling one rightly earns 0.5, not 1), and a
    right output whenever the outcome is not 1. Otherwise a wrong answer is penalised as missed if it is the program's
    own, and as a rejection if the program had it right.
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
    """The share, 0..1, of the plan's words (4 letters or underscores and more, no fillers) that the code contains."""
    words = set(_WORD.findall(code_plan.lower())) - _FILLERS
    code = code.lower()
    return sum(word in code for word in words) / len(words) if words else 0.0


def spec_matches(expected: str, stdout: str, *, compat: bool) -> bool:
    """Whether the program printed what the plan expected: as text, and outside compat mode also as a number."""
    wanted, printed = _normalised(expected), _normalised(stdout)
    if not wanted:
        return False
    return wanted == printed or (not compat and numbers_match(expected, stdout) is True)


def numbers_match(a: str, b: str) -> bool | None:
    """Whether the first numbers of two texts agree to 1e-6 (relative or absolute); None if one of them has none."""
    x, y = first_number(a), first_number(b)
    if x is None or y is None or not math.isfinite(x) or not math.isfinite(y):
        return None
    return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-6)


def _normalised(text: str) -> str:
    return " ".join(text.lower().replace("\\boxed", "").split())
