"""MAPPO (arXiv 2103.01955): a critic for all policies of a model, which reads all messages and observations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.gae import Valued
from recipe.dag.algorithms.ippo import Level

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch


class Mappo(Valued):
    source: ClassVar[str] = "arXiv 2103.01955"
    assumes: ClassVar[str] = (
        "all trained policies of a model share one critic, which reads all messages and observations; rewards are not "
        "copied to other agents"
    )
    spans_policies: ClassVar[bool] = True
    joint_critic: ClassVar[bool] = True

    estimator: Literal["mappo"] = "mappo"
    level: Level = "action"
    """The step of the chain. action: a whole call, valued before its first token. token: each sampled token."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    history_chars: int = Field(default=4000, ge=2)
    """Characters that the critic reads of a longer message, from its beginning and end; fewer if they do not fit."""

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.critic import mappo

        return mappo(batch, level=self.level, gamma=self.gamma, lam=self.lam, whiten=self.whiten)
