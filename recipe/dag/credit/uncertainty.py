"""Lower weights for rows that the policy was unsure of (UMAD, arXiv 2603.01221).

Invariant: weights are positive, so an advantage keeps its sign. The weight is 1 for a row with the mean surprise of its
group, for a group of one, and in a group without differences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import compress

from torch import Tensor

SAME = 1e-12
"""Difference (nats), relative or absolute, up to which surprises count as equal."""


def surprise(log_probs: Sequence[float], mask: Sequence[int]) -> float | None:
    """Return the mean negative log-prob (nats) of a row's sampled tokens under the policy that sampled them; None if
    there are none."""
    sampled = sum(mask)
    return -sum(compress(log_probs, mask)) / sampled if sampled else None


def uncertainty_weights(
    surprises: Sequence[float | None], group: Sequence[Hashable], *, alpha: float, bound: float
) -> list[float]:
    """Return [B] weights exp(-alpha z), where z is the row's surprise in sample standard deviations (n - 1) from the
    mean of its group, clipped to [-bound, bound]. Rows without sampled tokens (None) weigh 1 and are not part of the
    statistics. `group` [B]: equal for rows of one group."""
    groups: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for row, (value, key) in enumerate(zip(surprises, group, strict=True)):
        if value is not None:
            groups[key][row] = value
    weights = [1.0] * len(surprises)
    for members in groups.values():
        if len(members) < 2 or _all_equal(list(members.values())):
            continue
        mean = math.fsum(members.values()) / len(members)
        squares = math.fsum((value - mean) ** 2 for value in members.values())
        deviation = math.sqrt(squares / (len(members) - 1))
        # exp of a bounded z: one outlier can neither silence its row nor take over the loss
        for row, value in members.items():
            z = (value - mean) / deviation
            weights[row] = math.exp(-alpha * min(max(z, -bound), bound))
    return weights


def _all_equal(values: Sequence[float]) -> bool:
    return math.isclose(min(values), max(values), rel_tol=SAME, abs_tol=SAME)


def weighted(advantages: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
    """Return each row's advantages times its weight; a weight of 1 leaves every bit as it is."""
    return [values if weight == 1.0 else values * weight for values, weight in zip(advantages, weights, strict=True)]
