"""GDPO (arXiv 2601.05242): the rewards of each node are normalized separately before they are added.

Invariant: in a workflow that passes the checks, a component is the reward of one node, and every reward is a component.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from recipe.dag.algorithms.facts import Facts
from recipe.dag.algorithms.grouped import SEVERAL, Grouped
from recipe.dag.core.problem import Problem
from recipe.dag.core.suggestion import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch

CHANGES_REWARDS = "reward.credit:"
"""The module whose functions change the sum of all rewards instead of paying one of their own."""


class Gdpo(Grouped):
    source: ClassVar[str] = "arXiv 2601.05242"
    assumes: ClassVar[str] = (
        f"{SEVERAL}; several nodes pay rewards, each a component by its id (an env's: of the node that steps it)"
    )

    estimator: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = {}
    """Weights of the reward's components, by the node that pays: a reward node, or a rollout node with
    env_pays. 1 if absent."""

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.gdpo import gdpo

        options = {"group_by": self.group_by, "stat_unit": self.stat_unit, "gamma_turn": self.gamma_turn}
        return gdpo(batch, weights=self.weights, **options)

    def reward_columns(self, batch: CreditBatch) -> list[Sequence[float] | None]:
        """Return the components: they may differ where their sums do not."""
        from recipe.dag.credit.gdpo import components

        return [column for _, column in components(batch, self.weights).values()]

    def check(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check(facts)
        yield from list(self._check_components(facts)) or self._check_number(facts)

    def _check_components(self, facts: Facts) -> Iterator[Problem]:
        """Yield options that name no component, and rewards that cannot be one."""
        paying = facts.paying_nodes
        for name in self.weights:
            if name not in paying:
                hint = did_you_mean(name, paying) or "; a component has the name of the node that pays it"
                yield facts.problem(("algorithm", "weights", name), f"no node `{name}` pays a reward{hint}", key=True)
        if self.kl_reward_coef > 0:
            message = "gdpo compares the rewards of nodes, and no node pays the KL; use `kl_loss_coef`"
            yield facts.problem(("algorithm", "kl_reward_coef"), message, key=True)
        if self.overlong is not None and self.overlong.penalty is not None:
            message = (
                "gdpo divides each reward by its own deviation, so a penalty's size is lost; use `mask: true`, or grpo"
            )
            yield facts.problem(("algorithm", "overlong", "penalty"), message, key=True)
        for index, _, function, _ in facts.reward_functions:
            if function is not None and function.startswith(CHANGES_REWARDS):
                message = "this node changes the sum of all rewards, so it is not a component; remove it under gdpo"
                yield facts.problem(("nodes", index, "reward"), message)

    def _check_number(self, facts: Facts) -> Iterator[Problem]:
        """Yield a problem if fewer than two components are there, or none counts."""
        paying = facts.paying_nodes
        if len(paying) == 1:
            message = f"gdpo normalizes the rewards of each node separately, and only `{paying[0]}` pays; choose `grpo`"
            yield facts.problem(("algorithm", "estimator"), message)
        elif paying and not any(self.weights.get(name, 1.0) for name in paying):
            yield facts.problem(("algorithm", "weights"), "all weights are 0, so nothing is learned", key=True)
