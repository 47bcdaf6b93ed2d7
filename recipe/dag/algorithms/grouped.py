"""Estimators that compare the calls of a group: which calls, and which return of a call.

Invariant: `group_by` alone decides which calls are compared; calls of different policies are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from recipe.dag.algorithms.base import Algorithm, GroupKey, Scope
from recipe.dag.algorithms.facts import Facts
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import listing

StatUnit = Literal["call", "trajectory"]
SEVERAL = "several episodes per sample"
GROUP_BY: KeyPath = ("algorithm", "group_by")
GAMMA_TURN: KeyPath = ("algorithm", "gamma_turn")


class Comparing(Algorithm):
    """Estimators that compare the calls of a group."""

    assumes: ClassVar[str] = SEVERAL

    group_by: tuple[GroupKey, ...] = ("uid", "agent")
    """The keys in which compared calls agree. role: `agents[].role`, which pools agents of one policy. branch: episodes
    that took the same way to the call (the same nodes were skipped on it, and loops ran as many rounds). prompt_hash:
    the same prompt, token by token. trunk: an episode and its forks (`counterfactual`). Calls of different policies are
    never compared."""

    @property
    def grouping(self) -> tuple[GroupKey, ...]:
        return self.group_by

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check_options(facts)
        for position, key in enumerate(self.group_by):
            if key in self.group_by[:position]:
                yield facts.problem((*GROUP_BY, position), f"`{key}` is listed twice")
            elif facts.complete and (message := self._without_effect(key, facts)):
                yield facts.problem((*GROUP_BY, position), message)

    def _without_effect(self, key: GroupKey, facts: Facts) -> str | None:
        """Return why grouping by `key` changes nothing in this workflow; None if it may."""
        if key == "branch" and not facts.branches:
            return "nothing branches here: no node has a `when`, and there are no loops; remove it"
        if key == "trunk" and self.forks is None:
            return f"{self.estimator} forks no episodes, `counterfactual` does; remove it"
        written = self.group_by != type(self).model_fields["group_by"].default
        if key == "round" and not facts.loops and written:
            return "nothing runs in rounds here: there are no loops; remove it"
        return None

    def warn(self, facts: Facts) -> Iterator[Problem]:
        """Warn of a role whose agents have several policies, since calls of different policies are not compared."""
        yield from super().warn(facts)
        if "role" not in self.group_by:
            return
        policies_of: dict[str, dict[str, None]] = {}
        for agent in facts.agents:
            policies_of.setdefault(agent.role or agent.name, {})[agent.policy] = None
        path = (*GROUP_BY, self.group_by.index("role"))
        for role, policies in policies_of.items():
            if len(policies) > 1:
                names = ", ".join(policies)
                yield facts.problem(path, f"role `{role}` has several policies ({names}), whose calls are not compared")


class Grouped(Comparing):
    """Estimators that compare returns: of a trajectory, or of a call."""

    carries_back_unless: ClassVar[str | None] = "gamma_turn: 0"

    stat_unit: StatUnit = "trajectory"
    """The return of a call. trajectory: all that its agent earns in the episode. call: its own reward and, with
    gamma_turn, the later ones of its agent. Either way, a trajectory counts once in its group's mean and deviation."""
    gamma_turn: float | None = Field(default=None, ge=0.0, le=1.0)
    """Implies `stat_unit: call`: the discount of its agent's later rewards in the return of a call, per turn or round
    in between; 0: its own reward only. `stat_unit: call` needs it if an agent moves more than once in an episode."""

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

    @model_validator(mode="after")
    def _set_stat_unit_of_discount(self) -> Grouped:
        if self.gamma_turn is not None and "stat_unit" not in self.model_fields_set:
            object.__setattr__(self, "stat_unit", "call")
        return self

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check_options(facts)
        if self.gamma_turn is not None and self.stat_unit == "trajectory":
            message = "a trajectory's return is the sum of its rewards; remove this, or add `stat_unit: call`"
            yield facts.problem(GAMMA_TURN, message, key=True)
        if self.stat_unit == "call" and self.gamma_turn is None and facts.complete and (agent := facts.repeated_agent):
            message = (
                f"agent `{agent}` may move more than once in an episode: write how much its later rewards count for a "
                "call, `gamma_turn: 1.0` for all, `gamma_turn: 0.0` for none; or use `stat_unit: trajectory`"
            )
            yield facts.problem(("algorithm", "stat_unit"), message, key=True)

    def warn(self, facts: Facts) -> Iterator[Problem]:
        """Warn of groups in which discounted sums have different numbers of terms: with equal rewards, the sum of more
        terms is larger."""
        yield from super().warn(facts)
        if not self.gamma_turn or "prompt_hash" in self.group_by:
            return
        if facts.uneven_groups(self.group_by):
            message = (
                "calls with more later calls of their agent are compared with calls that have fewer; "
                f"group by {listing(self._needed_keys(facts))}, too"
            )
            yield facts.problem(GAMMA_TURN, message, key=True)

    def _needed_keys(self, facts: Facts) -> list[str]:
        """Return the keys that make groups even, without those that can be left out."""
        keys = ["node", "turn", "round"]
        for key in tuple(keys):
            fewer = [other for other in keys if other != key]
            if not facts.uneven_groups((*self.group_by, *fewer)):
                keys = fewer
        return keys
