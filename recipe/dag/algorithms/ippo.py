"""IPPO (arXiv 2011.09533): a critic per policy that reads what its agents read, over calls or tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.base import Scope
from recipe.dag.algorithms.facts import Facts
from recipe.dag.algorithms.gae import CRITIC, Valued
from recipe.dag.core.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch

Level = Literal["action", "token"]


class Ippo(Valued):
    source: ClassVar[str] = "arXiv 2011.09533"
    assumes: ClassVar[str] = f"{CRITIC}, which reads what its agents read"

    estimator: Literal["ippo"] = "ippo"
    stream: Literal["agent", "call"] = "agent"
    """The calls of one chain of steps. agent: an agent's calls of an episode, so that later rewards reach its earlier
    calls. call: each call by itself, for agents that move once."""
    level: Level = "action"
    """The step of the chain. action: a whole call, valued before its first token. token: each sampled token."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.critic import ippo

        options = {"gamma": self.gamma, "lam": self.lam, "whiten": self.whiten}
        return ippo(batch, stream=self.stream, level=self.level, **options)

    @property
    def unscored_scope(self) -> Scope:
        return "call" if self.stream == "call" else "link"

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check_options(facts)
        if self.stream == "call" and facts.complete and (agent := facts.repeated_agent):
            message = (
                f"agent `{agent}` may move more than once in an episode, and its earlier calls would get no credit for "
                "later rewards; use `stream: agent`"
            )
            yield facts.problem(("algorithm", "stream"), message, key=True)
