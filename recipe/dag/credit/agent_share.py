"""How much of a policy's loss belongs to each of its agents, and weights that give all of them equal parts.

Invariant: weights are computed from all rows that the policy learns from in a step and multiply advantages, so neither
micro-batches nor mini-batches nor ranks change them. Calls outside the loss have no part in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, cat

from recipe.dag.core.tensors import as_tensor
from recipe.dag.types.row import Row

SILENT = 1e-9
"""Sum of |advantage| up to which a group teaches nothing."""


def loss_shares(rows: Sequence[Row], loss_agg: str, weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the share of each agent in the weights of the rows' tokens; {} if no token is in the loss.

    `weights`: by which the loss of each agent is multiplied, 1 each if absent."""
    totals: dict[str, float] = defaultdict(float)
    for row in rows:
        tokens = row.loss_mask()
        # token-mean and seq-mean-token-sum weigh each token the same; only seq-mean-token-mean counts rows
        scale = 1.0 / max(sum(tokens), 1) if loss_agg == "seq-mean-token-mean" else 1.0
        for call, (start, end) in zip(row.calls, row.spans(), strict=True):
            weight = 1.0 if weights is None else weights[call.agent]
            totals[call.agent] += weight * scale * sum(tokens[start:end])
    total = sum(totals.values())
    return {agent: part / total for agent, part in totals.items() if part} if total else {}


def equal_weights(rows: Sequence[Row], loss_agg: str) -> dict[str, float]:
    """Return a weight for each agent, such that all agents with a token in the loss have equal shares, and the sum over
    the loss stays what it was."""
    shares = loss_shares(rows, loss_agg)
    agents = {call.agent for row in rows for call in row.calls}
    return {agent: 1.0 / (len(shares) * shares[agent]) if agent in shares else 1.0 for agent in agents}


def weighted(rows: Sequence[Row], advantages: Sequence[Tensor], weights: Sequence[Mapping[str, float]]) -> list[Tensor]:
    """Return each row's advantages times the weight of the token's agent, from one mapping per row; a weight of 1
    leaves every bit as it is."""
    return [
        cat(
            [
                values[start:end] if own[call.agent] == 1.0 else values[start:end] * own[call.agent]
                for call, (start, end) in zip(row.calls, row.spans(), strict=True)
            ]
        )
        for row, values, own in zip(rows, advantages, weights, strict=True)
    ]


def lessons(rows: Sequence[Row], advantages: Sequence[Tensor], loss_agg: str) -> dict[str, dict[str, float]]:
    """Return what each agent's tokens in the loss are taught, by agent and name.

    grad_mass: share of the sum of weight times |advantage| over the rows; absent if no token has an advantage
    advantage_size: mean of |advantage| over its tokens
    silent_groups: share of its samples (`uid`) in which none of its tokens has an advantage
    """
    mass: dict[str, float] = defaultdict(float)
    sizes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    spoken: dict[str, dict[str, bool]] = defaultdict(dict)
    for row, values in zip(rows, advantages, strict=True):
        tokens = row.loss_mask()
        scale = 1.0 / max(sum(tokens), 1) if loss_agg == "seq-mean-token-mean" else 1.0
        sums = [0.0, *(values.abs().double() * as_tensor(tokens, np.int64)).cumsum(0).tolist()]
        for call, (start, end) in zip(row.calls, row.spans(), strict=True):
            count, size = sum(tokens[start:end]), sums[end] - sums[start]
            if count:
                mass[call.agent] += scale * size
                sizes[call.agent][0] += size
                sizes[call.agent][1] += count
                spoken[call.agent][row.uid] = spoken[call.agent].get(row.uid, False) or size > SILENT
    total = sum(mass.values())
    return {
        agent: {
            **({"grad_mass": part / total} if total > SILENT else {}),
            "advantage_size": sizes[agent][0] / sizes[agent][1],
            "silent_groups": 1.0 - sum(spoken[agent].values()) / len(spoken[agent]),
        }
        for agent, part in mass.items()
    }
