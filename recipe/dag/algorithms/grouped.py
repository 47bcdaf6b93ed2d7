"""Estimators that compare the calls of a group: which calls, and what a call is worth.

Invariant: what is compared is decided by `group_by` alone; calls of different policies are never compared.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from recipe.dag.algorithms.base import Algorithm, GroupKey, Scope

StatUnit = Literal["call", "trajectory"]
SEVERAL = "several episodes per sample"


class Grouped(Algorithm):
    assumes: ClassVar[str] = SEVERAL

    group_by: tuple[GroupKey, ...] = ("uid", "agent")
    """What calls must have in common to be compared. role: `agents[].role`, which pools agents of one policy. branch:
    episodes that took the same way to the call (on it the same nodes were skipped and loops ran as many rounds).
    prompt_hash: the same prompt, token by token. Calls of different policies are never compared."""
    stat_unit: StatUnit = "trajectory"
    """What a call is worth. trajectory: all that its agent earns in the episode. call: its own reward and, with
    gamma_turn, the later ones of its agent. Either way, a trajectory counts once in its group's mean and deviation."""
    gamma_turn: float | None = Field(None, ge=0.0, le=1.0)
    """Makes stat_unit `call`: how much of its agent's later rewards a call is worth, per turn or round in between; 0:
    its own reward only. `stat_unit: call` needs it where an agent moves more than once in an episode."""

    @property
    def grouping(self) -> tuple[GroupKey, ...]:
        return self.group_by

    @property
    def discount_per_turn(self) -> float | None:
        return self.gamma_turn

    @property
    def unscored_scope(self) -> Scope:
        if self.stat_unit == "trajectory":
            return "trajectory"
        return "earlier" if self.gamma_turn else "call"

    @property
    def advantages_per_turn(self) -> bool:
        return self.stat_unit == "call"

    @property
    def carries_back(self) -> bool:
        return self.stat_unit == "trajectory" or bool(self.gamma_turn)

    @model_validator(mode="after")
    def _as_discount_has_it(self) -> Grouped:
        if self.gamma_turn is not None and "stat_unit" not in self.model_fields_set:
            object.__setattr__(self, "stat_unit", "call")
        return self
