"""GDPO (arXiv 2601.05242): what each node pays is normalised by itself before the parts are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from recipe.dag.algorithms.grouped import SEVERAL, Grouped

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch


class Gdpo(Grouped):
    source: ClassVar[str] = "arXiv 2601.05242"
    assumes: ClassVar[str] = (
        f"{SEVERAL}; several nodes pay rewards, each a component by its node_id (an env's: of the node that steps it)"
    )

    estimator: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = {}
    """Of the reward's components, by the node that pays: a reward node, or a rollout node with rewards_with_env. 1
    where absent."""

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.gdpo import gdpo

        options = {"group_by": self.group_by, "stat_unit": self.stat_unit, "gamma_turn": self.gamma_turn}
        return gdpo(batch, weights=self.weights, **options)

    def reward_columns(self, batch: CreditBatch) -> list[Sequence[float] | None]:
        """Components may differ where their sums do not."""
        from recipe.dag.credit.gdpo import components

        return [column for _, column in components(batch, self.weights).values()]
