"""How much of a policy's loss belongs to each of its agents, and weights that give all of them equal parts.

Invariant: weights are computed from all rows that the policy learns from in a step and multiply advantages, so neither
micro-batches nor mini-batches nor ranks change them. Rows outside the loss have no part in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from recipe.dag.types.row import Row


def loss_shares(rows: Sequence[Row], loss_agg: str, weights: Sequence[float] | None = None) -> dict[str, float]:
    """Return the share of each agent in the weights of the rows' tokens; {} if no token is in the loss.

    `weights`: by which the loss of each row is multiplied, 1 each if absent."""
    totals: dict[str, float] = defaultdict(float)
    for row, weight in zip(rows, weights or [1.0] * len(rows), strict=True):
        totals[row.agent] += weight * _loss_weight(row, loss_agg)
    total = sum(totals.values())
    return {agent: part / total for agent, part in totals.items() if part} if total else {}


def equal_weights(rows: Sequence[Row], loss_agg: str) -> list[float]:
    """Return a weight for each row, such that all agents with a token in the loss have equal shares, and the sum over
    the loss stays what it was."""
    shares = loss_shares(rows, loss_agg)
    return [1.0 / (len(shares) * shares[row.agent]) if row.agent in shares else 1.0 for row in rows]


def _loss_weight(row: Row, loss_agg: str) -> float:
    """Return the row's part in the sum that `agg_loss` divides by a number common to all rows."""
    tokens = sum(row.loss_mask())
    # token-mean and seq-mean-token-sum weigh each token the same; with seq-mean-token-mean, a row is one call
    return float(tokens > 0) if loss_agg == "seq-mean-token-mean" else float(tokens)
