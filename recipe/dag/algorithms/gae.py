"""GAE over the values of a critic: an agent's tokens (PPO, arXiv 1506.02438), or one chain of all (MARFT)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.base import Algorithm, Scope

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch

CRITIC = "every trained policy has a critic"


class Valued(Algorithm):
    """Estimators that read a critic's values."""

    assumes: ClassVar[str] = CRITIC
    needs_values: ClassVar[bool] = True

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token; under ippo and mappo, per step (`level`)."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Decay of the TD errors of later steps (GAE's lambda)."""
    whiten: bool = True
    """Scale the advantages of a policy's tokens to mean 0 and variance 1."""
    critic_warmup: int = Field(default=0, ge=0)
    """Steps at the start in which only critics learn."""

    @property
    def warmup_steps(self) -> int:
        return self.critic_warmup

    @property
    def unscored_scope(self) -> Scope:
        return "link"


class Gae(Valued):
    source: ClassVar[str] = "PPO, arXiv 1506.02438; IPPO with a policy per agent"

    estimator: Literal["gae"] = "gae"

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.chain import gae

        return gae(batch, gamma=self.gamma, lam=self.lam, whiten=self.whiten)


class GaeChain(Valued):
    source: ClassVar[str] = "MARFT, arXiv 2504.16129"
    assumes: ClassVar[str] = f"{CRITIC}; rewards are not copied to other agents"
    spans_policies: ClassVar[bool] = True

    estimator: Literal["gae_chain"] = "gae_chain"

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.chain import gae_chain

        return gae_chain(batch, gamma=self.gamma, lam=self.lam, whiten=self.whiten)
