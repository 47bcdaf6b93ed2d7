"""Weights of a batch's tokens: by the distance of the server's log-probs to the trainer's, and by how unsure the policy
was.

Invariant: computed on the driver from all rows of a policy in a step, before they are cut into mini-batches.
"""

from __future__ import annotations

import numpy as np

from recipe.dag.algorithms.blocks import Importance, Uncertainty
from recipe.dag.core.tensors import as_tensor
from recipe.dag.credit.agent_share import weighted
from recipe.dag.credit.importance import importance_weights
from recipe.dag.credit.uncertainty import surprise, uncertainty_weights
from recipe.dag.train.kernels import PolicyBatch


def weigh_importance(batch: PolicyBatch, options: Importance) -> None:
    """Add the importance weights of the rows' tokens, by which the update multiplies its loss."""
    rows = batch.rows
    batch.columns["rollout_is_weights"], metrics = importance_weights(
        batch.columns["old_log_probs"],
        [as_tensor(row.rollout_log_probs, np.float32) for row in rows],
        [as_tensor(row.response_mask, np.int64) for row in rows],
        [[call.end for call in row.calls] for row in rows],
        **options.model_dump(),
    )
    batch.metrics |= metrics


def weigh_uncertainty(batch: PolicyBatch, options: Uncertainty) -> None:
    """Multiply the advantages of each agent in each row by their uncertainty weight."""
    parts = [(row, agent) for row in batch.rows for agent in row.agents]
    weights = uncertainty_weights(
        [surprise(row.rollout_log_probs, row.agent_mask(agent)) for row, agent in parts],
        [(row.uid, agent) for row, agent in parts],
        alpha=options.alpha,
        bound=options.bound,
    )
    remaining = iter(weights)
    by_row = [{agent: next(remaining) for agent in row.agents} for row in batch.rows]
    batch.columns["advantages"] = weighted(batch.rows, batch.columns["advantages"], by_row)
    batch.metrics |= {"uncertainty_weight/min": min(weights), "uncertainty_weight/max": max(weights)}
