"""VDN (arXiv 1706.05296) and QMIX (arXiv 1803.11485): the team's value, learned on the driver, is divided among calls.

Invariant: calls of different turns have different returns to go, so they are compared turn by turn, and each call is
worth its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.base import Algorithm, GroupKey, Scope, held
from recipe.dag.algorithms.grouped import SEVERAL, StatUnit
from recipe.dag.algorithms.grpo import Center, Scale
from recipe.dag.workflow.blocks import Mixer

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch


class QmixMixer(Mixer):
    mixing_hidden: int = Field(32, ge=1)
    """Width of the mixing network."""

    @property
    def widths(self) -> dict[str, int]:
        return {**super().widths, "mixing_hidden": self.mixing_hidden}


class Vdn(Algorithm):
    source: ClassVar[str] = "arXiv 1706.05296"
    assumes: ClassVar[str] = (
        f"{SEVERAL}; rewards are the team's, not copied to other agents; credit only against calls that cannot react"
    )
    spans_policies: ClassVar[bool] = True

    estimator: Literal["vdn"] = "vdn"
    group_by: tuple[GroupKey, ...] = ("uid", "agent", "turn")
    """What calls must have in common to be compared."""
    stat_unit: Annotated[StatUnit, held("vdn", "call")] = "call"
    center: Center = "mean"
    scale: Scale = "std"
    mixer: Mixer = Mixer()

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.mixer_credit import compared

        return compared(batch, group_by=self.group_by, stat_unit=self.stat_unit, center=self.center, scale=self.scale)

    @property
    def grouping(self) -> tuple[GroupKey, ...]:
        return self.group_by

    @property
    def team_value(self) -> Mixer:
        return self.mixer

    @property
    def discount_per_turn(self) -> float:
        return self.mixer.gamma_turn

    @property
    def unscored_scope(self) -> Scope:
        return "episode"

    @property
    def carries_back(self) -> bool:
        return self.mixer.gamma_turn > 0


class Qmix(Vdn):
    source: ClassVar[str] = "arXiv 1803.11485"
    assumes: ClassVar[str] = "as vdn; the team's value rises with each message's"

    estimator: Literal["qmix"] = "qmix"
    stat_unit: Annotated[StatUnit, held("qmix", "call")] = "call"
    mixer: QmixMixer = QmixMixer()
