"""REINFORCE without a baseline (Williams 1992), and REINFORCE++, which normalises over all tokens of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.base import Algorithm, Scope
from recipe.dag.algorithms.grouped import Grouped, StatUnit

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch


class Reinforce(Algorithm):
    source: ClassVar[str] = "Williams 1992"
    assumes: ClassVar[str] = "no baseline"
    carries_back_unless: ClassVar[str | None] = "stat_unit: call"

    estimator: Literal["reinforce"] = "reinforce"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token."""
    stat_unit: StatUnit = "trajectory"
    """The return of a call. trajectory: its own reward and the later ones of its agent in the episode. call: its own
    reward alone, for rewards that judge each action by itself (MAPPA, arXiv 2601.23228): more actions earn no more."""

    @property
    def unscored_scope(self) -> Scope:
        return "call" if self.stat_unit == "call" else "earlier"

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.reinforce import reinforce

        return reinforce(batch, gamma=self.gamma, stat_unit=self.stat_unit)


class ReinforcePP(Reinforce):
    source: ClassVar[str] = "arXiv 2501.03262"
    assumes: ClassVar[str] = "one episode is enough"

    estimator: Literal["reinforce_pp"] = "reinforce_pp"

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.reinforce import reinforce_pp

        return reinforce_pp(batch, gamma=self.gamma, stat_unit=self.stat_unit)


class ReinforcePPBaseline(Grouped):
    source: ClassVar[str] = "arXiv 2501.03262"

    estimator: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.reinforce import reinforce_pp_baseline

        options = {"group_by": self.group_by, "stat_unit": self.stat_unit, "gamma_turn": self.gamma_turn}
        return reinforce_pp_baseline(batch, **options)
