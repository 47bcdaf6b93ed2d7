"""VDN (arXiv 1706.05296) and QMIX (arXiv 1803.11485): the team's value, learned on the driver, is divided among calls.

Invariant: calls of different turns have different returns to go, so they are compared turn by turn, and each call has
its own return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from recipe.dag.algorithms.base import GroupKey, Scope, held
from recipe.dag.algorithms.grouped import SEVERAL, Comparing, StatUnit
from recipe.dag.algorithms.grpo import Center, Scale
from recipe.dag.algorithms.mixer import Mixer, QmixMixer

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch


class Vdn(Comparing):
    source: ClassVar[str] = "arXiv 1706.05296"
    assumes: ClassVar[str] = (
        f"{SEVERAL}; rewards are the team's, not copied to other agents; credit only against calls that cannot react"
    )
    spans_policies: ClassVar[bool] = True

    estimator: Literal["vdn"] = "vdn"
    group_by: tuple[GroupKey, ...] = ("uid", "agent", "turn")
    """The keys in which compared calls agree."""
    stat_unit: Annotated[StatUnit, held("vdn", "call")] = "call"
    center: Center = "mean"
    scale: Scale = "std"
    mixer: Mixer = Mixer()

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.joint_advantages import mixer_advantages

        return mixer_advantages(
            batch, group_by=self.group_by, stat_unit=self.stat_unit, center=self.center, scale=self.scale
        )

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
