"""Critics that policies share, and the batches that go to them and back.

Invariant: a critic belongs to one policy and learns from the rows of all policies that share it, in the policies'
order, in one forward pass and one update per step. It values and learns the tokens of the response, whatever prompt it
reads before them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recipe.dag.core.tensors import as_tensor
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.types.row import Row
from recipe.dag.workflow.agent_schema import Critic
from recipe.dag.workflow.schema import Workflow


@dataclass(slots=True)
class CriticBatch:
    """The rows of one critic in one step."""

    spec: Critic
    shares: dict[str, PolicyBatch]
    """The batches of the policies that use it."""
    batch: PolicyBatch
    """The rows of all `shares`, concatenated, as the critic reads them."""
    updated: bool = False

    def split_to_policies(self, column: str) -> None:
        """Copy a column of `batch` into the policies' batches."""
        start = 0
        for share in self.shares.values():
            share.columns[column] = self.batch.columns[column][start : start + len(share.rows)]
            start += len(share.rows)

    def concat(self, column: str) -> None:
        """Copy a column of the policies' batches into `batch`; undoes `split_to_policies`."""
        self.batch.columns[column] = [tensor for share in self.shares.values() for tensor in share.columns[column]]


def critic_batches(
    workflow: Workflow, batches: dict[str, PolicyBatch], convert: Callable[[str, Row], Row] | None = None
) -> dict[str, CriticBatch]:
    """Return the batch of each critic that has rows in this step, by its owner. `convert(owner, row)` replaces the
    row's prompt by the one that the owner's critic reads."""
    shares: dict[str, dict[str, PolicyBatch]] = {}
    for name, batch in batches.items():
        owner = workflow.critic_owner(name)
        if owner is not None:
            shares.setdefault(owner, {})[name] = batch
    critics = {}
    for owner, policy_batches in shares.items():
        spec = workflow.policies[owner].critic
        assert spec is not None  # the loader lets policies share existing critics only
        rows = [row for batch in policy_batches.values() for row in batch.rows]
        if convert is not None:
            rows = [convert(owner, row) for row in rows]
        critics[owner] = CriticBatch(spec, policy_batches, PolicyBatch(rows))
    return critics


def value_metrics(batch: PolicyBatch) -> dict[str, float]:
    """Return how well the values predict the returns, over sampled tokens. Explained variance is 1 for a perfect
    prediction, 0 for one no better than the mean, and absent if all returns are equal."""
    mask = torch.cat([as_tensor(row.response_mask, bool) for row in batch.rows])
    values = torch.cat(batch.columns["values"])[mask].double()
    metrics = {"critic/value_mean": values.mean().item()}
    if "returns" in batch.columns:
        returns = torch.cat(batch.columns["returns"])[mask].double()
        metrics["critic/return_mean"] = returns.mean().item()
        if len(returns) > 1 and returns.var() > 0:
            metrics["critic/explained_variance"] = 1 - ((returns - values).var() / returns.var()).item()
    return metrics
