"""Computes advantages from rows, by a workflow's `algorithm`.

Invariant: credit is a pure function of one policy's rows, or of all policies' rows if the algorithm spans policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.tree import candidate_advantages

if TYPE_CHECKING:
    from recipe.dag.algorithms.base import Algorithm
    from recipe.dag.algorithms.tree import Tree
    from recipe.dag.types.row import Row


def estimate(
    algorithm: Algorithm,
    rows: Sequence[Row],
    *,
    values: Sequence[Tensor | None] | None = None,
    penalties: Sequence[Tensor | None] | None = None,
    mixer_credits: Sequence[Sequence[float]] | None = None,
    baselines: Mapping[str, float] | None = None,
    log_ratios: Sequence[Tensor | None] | None = None,
    base: str = "",
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return (advantages, returns) of one policy's rows, or of all policies', in their order: one float32 tensor per
    row, as long as its response, 0 where the mask is 0.

    `values`, `penalties` (added to each token's reward) and `log_ratios` (of the policy to its reference): per row a
    tensor as long as its response, or None. `mixer_credits`: per row, the credit that a mixer gives its calls beside
    their rewards. `baselines`: by role. `base`: the workflow file, for a user's estimator. Raises ValueError for bad
    rows and missing values, UserError for errors of a user's estimator.
    """
    if algorithm.needs_values and values is None:
        raise ValueError(f"estimator {algorithm.estimator} needs a critic's values")
    if not algorithm.pairs_calls and any(call.candidate is not None for row in rows for call in row.calls):
        return _of_candidates(algorithm, rows, baselines, base)
    columns = {"values": values, "penalties": penalties, "mixer_credits": mixer_credits, "baselines": baselines}
    return algorithm.credit(credit_batch(algorithm, rows, **columns, log_ratios=log_ratios), base)


def score_advantages(algorithm: Algorithm, rows: Sequence[Row]) -> list[list[float]]:
    """Return, per row, the advantage of each call's score among the candidates; 0 for other calls."""
    tree = _tree(algorithm)
    options = {"compare": tree.compare, "scale": tree.scale, "gamma": tree.gamma, "lam": tree.lam}
    return [[tree.local * advantage for advantage in own] for own in candidate_advantages(rows, **options)]


def _of_candidates(
    algorithm: Algorithm, rows: Sequence[Row], baselines: Mapping[str, float] | None, base: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns) where some calls are candidates: the estimator credits those that were kept with
    what the episode earned, and each candidate's score is compared with other scores. Workflows with candidates have
    neither critics nor penalties."""
    later = _tree(algorithm).later
    kept = [row for row in rows if not row.is_dropped]
    credited = algorithm.credit(credit_batch(algorithm, kept, baselines=baselines), base) if kept else ((), ())
    results = iter(zip(*credited, strict=True))
    advantages: list[Tensor] = []
    returns: list[Tensor] = []
    for row, scored in zip(rows, score_advantages(algorithm, rows), strict=True):
        mask = torch.tensor(row.response_mask, dtype=torch.float32)
        own, row_returns = (torch.zeros_like(mask), torch.zeros_like(mask)) if row.is_dropped else next(results)
        own = own.clone()
        for call, (start, end), advantage in zip(row.calls, row.spans(), scored, strict=True):
            if call.candidate is not None:
                own[start:end] = later * own[start:end] + advantage * mask[start:end]
        advantages.append(own)
        returns.append(row_returns)
    return advantages, returns


def _tree(algorithm: Algorithm) -> Tree:
    from recipe.dag.algorithms.tree import Tree

    return algorithm.tree or Tree()


def credit_batch(algorithm: Algorithm, rows: Sequence[Row], **columns: Any) -> CreditBatch:
    """Return the batch that the algorithm credits, with the keyword arguments `columns` of `from_rows`."""
    return CreditBatch.from_rows(
        rows,
        # a mixer divides the team's value first; what it credits is compared policy by policy
        one_policy=not algorithm.spans_policies or algorithm.team_value is not None,
        prompts="prompt_hash" in algorithm.grouping,
        **columns,
    )
