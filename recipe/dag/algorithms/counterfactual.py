"""Counterfactual credit: answers to one frozen context, each played to the end, are compared (C3, arXiv 2603.06859).

Invariant: calls are compared only if they are at the same decision of the same episode or of its forks, which repeat
all that the decision does not change. The mean of the others does not depend on an answer, so its expected advantage
is its exact value: the expected return with it, less the expected return with an answer of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.base import Forks, GroupKey, held
from recipe.dag.algorithms.facts import Facts
from recipe.dag.algorithms.grouped import StatUnit
from recipe.dag.algorithms.grpo import Center, Grpo, Scale
from recipe.dag.core.problem import Problem

KEYS: tuple[GroupKey, ...] = ("uid", "trunk", "agent", "node", "turn", "round")


class Counterfactual(Grpo):
    source: ClassVar[str] = "C3, arXiv 2603.06859"
    assumes: ClassVar[str] = (
        "one episode per sample is enough; envs and tools repeat their results; no `candidates`, no rewards of groups"
    )
    carries_back_unless: ClassVar[str | None] = None

    estimator: Literal["counterfactual"] = "counterfactual"
    alternatives: int = Field(default=4, ge=2)
    """Answers that are compared at a decision: the episode's own, and one in each of its forks. A fork repeats the
    episode up to the decision and all that cannot react to it, and samples the rest."""
    decisions: int | None = Field(default=None, ge=1)
    """The most decisions of an episode that get alternatives, drawn by lot; if absent, all do. An episode has up to
    decisions x (alternatives - 1) forks."""
    group_by: Annotated[tuple[GroupKey, ...], held("counterfactual", KEYS)] = KEYS
    stat_unit: Annotated[StatUnit, held("counterfactual", "trajectory")] = "trajectory"
    gamma_turn: Annotated[float | None, held("counterfactual", None, "whole returns")] = None
    center: Annotated[Center, held("counterfactual", "leave_one_out")] = "leave_one_out"
    scale: Annotated[Scale, held("counterfactual", "none")] = "none"

    @property
    def forks(self) -> Forks:
        return Forks(self.alternatives, self.decisions)

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check_options(facts)
        if self.happo is not None:
            message = "needs every call of an episode in the loss, and of a fork one is; remove it"
            yield facts.problem(("algorithm", "happo"), message, key=True)
        if self.kl_reward_coef > 0:
            message = "only one call of a fork would pay the KL, and all calls of its episode; use `kl_loss_coef`"
            yield facts.problem(("algorithm", "kl_reward_coef"), message, key=True)
        if facts.drops_turns:
            message = "decisions of all turns are compared; write `all`"
            yield facts.problem(("episode", "train_turns"), message)

    def check(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check(facts)
        for index, node in enumerate(facts.nodes):
            if node.candidates is not None:
                message = "counterfactual samples the alternatives of every decision itself; remove this"
                yield facts.problem(("nodes", index, "candidates"), message, key=True)
            if node.scope == "group":
                message = "counterfactual compares returns, and what a group earns depends on all forks; use `episode`"
                yield facts.problem(("nodes", index, "scope"), message)
