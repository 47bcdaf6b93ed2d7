"""REINFORCE without a baseline (Williams 1992) or with a moving average per role, and REINFORCE++, which normalises
over all tokens of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.base import Algorithm, Scope
from recipe.dag.algorithms.grouped import Grouped, StatUnit

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch


class Returns(Algorithm):
    """What REINFORCE and REINFORCE++ share: discounted returns per token."""

    carries_back_unless: ClassVar[str | None] = "stat_unit: call"

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token."""
    stat_unit: StatUnit = "trajectory"
    """The return of a call. trajectory: its own reward and the later ones of its agent in the episode. call: its own
    reward alone, for rewards that judge each action by itself (MAPPA, arXiv 2601.23228): more actions earn no more."""

    @property
    def unscored_scope(self) -> Scope:
        return "call" if self.stat_unit == "call" else "earlier"


class Reinforce(Returns):
    source: ClassVar[str] = "Williams 1992"
    assumes: ClassVar[str] = "no baseline, unless `ema_baseline` is set"

    estimator: Literal["reinforce"] = "reinforce"
    ema_baseline: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Decay of SPIRAL's baseline (arXiv 2506.24119 has 0.95): an exponential moving average, per policy and role, of
    what trajectories earned (of what calls did, with `stat_unit: call`). It starts at 0 and is subtracted from returns;
    then the step's mean moves it by 1 - decay. Without it, returns are the advantages."""

    @property
    def decay_of_baseline(self) -> float | None:
        return self.ema_baseline

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.reinforce import reinforce

        return reinforce(batch, gamma=self.gamma, stat_unit=self.stat_unit)


class ReinforcePP(Returns):
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
