"""Who shares which critic, and the rows on their way to it and back.

Invariant: a critic belongs to one policy and learns from the rows of all policies that share it, in the policies'
order, in one forward pass and one update per step. Whatever it reads before a response, it values and learns the tokens
of the response. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recipe.dag.episode.row import Row
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.workflow.schema import Critic, Workflow


@dataclass(slots=True)
class CriticBatch:
    """The rows of one critic in one step."""

    spec: Critic
    shares: dict[str, PolicyBatch]
    """The batches of the policies that use it."""
    batch: PolicyBatch
    """Their rows, end to end, as the critic reads them."""
    updated: bool = False

    def hand_out(self, column: str) -> None:
        """Cut a column of `batch` into the policies' own."""
        start = 0
        for share in self.shares.values():
            share.columns[column] = self.batch.columns[column][start : start + len(share.rows)]
            start += len(share.rows)

    def collect(self, column: str) -> None:
        self.batch.columns[column] = [one for share in self.shares.values() for one in share.columns[column]]


def critic_batches(
    workflow: Workflow, batches: dict[str, PolicyBatch], seen: Callable[[str, Row], Row] | None = None
) -> dict[str, CriticBatch]:
    """By owner; a critic without rows in this step is not there. `seen(owner, row)`: the row with the prompt that the
    owner's critic reads in place of the policy's."""
    shares: dict[str, dict[str, PolicyBatch]] = {}
    for name, batch in batches.items():
        owner = workflow.critic_owner(name)
        if owner is not None:
            shares.setdefault(owner, {})[name] = batch
    found = {}
    for owner, mine in shares.items():
        rows = [row if seen is None else seen(owner, row) for share in mine.values() for row in share.rows]
        found[owner] = CriticBatch(workflow.policies[owner].critic, mine, PolicyBatch(rows))
    return found


def value_metrics(batch: PolicyBatch) -> dict[str, float]:
    """How well the values foresaw the returns, over sampled tokens; explained variance is 1 for perfect, 0 for no
    better than their mean, and absent where all returns are equal."""
    mask = torch.cat([torch.tensor(row.response_mask) for row in batch.rows]).bool()
    values = torch.cat(batch.columns["values"])[mask].double()
    metrics = {"critic/value_mean": values.mean().item()}
    if "returns" in batch.columns:
        returns = torch.cat(batch.columns["returns"])[mask].double()
        metrics["critic/return_mean"] = returns.mean().item()
        if len(returns) > 1 and returns.var() > 0:
            metrics["critic/explained_variance"] = 1 - ((returns - values).var() / returns.var()).item()
    return metrics
