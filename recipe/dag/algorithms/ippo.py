"""IPPO (arXiv 2011.09533): a critic per policy that reads what its agents read, over calls or tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.base import Scope
from recipe.dag.algorithms.gae import CRITIC, Valued

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch

Level = Literal["action", "token"]


class Ippo(Valued):
    source: ClassVar[str] = "arXiv 2011.09533"
    assumes: ClassVar[str] = f"{CRITIC}, which reads what its agents read"

    estimator: Literal["ippo"] = "ippo"
    stream: Literal["agent", "call"] = "agent"
    """What one chain of steps is. agent: an agent's calls of an episode, so that what it earns later reaches its
    earlier calls. call: each call by itself, for agents that move once."""
    level: Level = "action"
    """What a step is. action: a whole call, valued before its first token. token: each sampled token."""
    lam: float = Field(0.95, ge=0.0, le=1.0)

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.critic import ippo

        options = {"gamma": self.gamma, "lam": self.lam, "whiten": self.whiten}
        return ippo(batch, stream=self.stream, level=self.level, **options)

    @property
    def unscored_scope(self) -> Scope:
        return "call" if self.stream == "call" else "earlier"

    @property
    def carries_back(self) -> bool:
        return self.stream == "agent"
