"""Less weight for what the policy was unsure of (UMAD, arXiv 2603.01221).

Invariant: the weight is positive, so an advantage keeps its sign, and it is 1 for a row that is as sure as its group on
average, for a group of one, and for a group that is equally sure throughout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import compress

from torch import Tensor

SAME = 1e-12
"""Spread (nats), relative or absolute, within which rows are equally sure."""


def surprise(log_probs: Sequence[float], mask: Sequence[int]) -> float | None:
    """Mean negative log-prob (nats) of a row's sampled tokens under the policy that sampled them; None if there are
    none."""
    sampled = sum(mask)
    return -sum(compress(log_probs, mask)) / sampled if sampled else None


def uncertainty_weights(
    surprises: Sequence[float | None], group: Sequence[Hashable], *, alpha: float = 0.25, bound: float = 5.0
) -> list[float]:
    """exp(-alpha z) per row, where z is the row's `surprise` in standard deviations (n - 1) from the mean of its group,
    at most `bound` away. Rows without sampled tokens count in no group and weigh 1."""
    groups: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for index, (value, name) in enumerate(zip(surprises, group, strict=True)):
        if value is not None:
            groups[name][index] = value
    weights = [1.0] * len(surprises)
    for members in groups.values():
        mean = math.fsum(members.values()) / len(members)
        squares = math.fsum((value - mean) ** 2 for value in members.values())
        if len(members) > 1 and not math.isclose(
            min(members.values()), max(members.values()), rel_tol=SAME, abs_tol=SAME
        ):
            deviation = math.sqrt(squares / (len(members) - 1))
            for index, value in members.items():
                weights[index] = math.exp(-alpha * min(max((value - mean) / deviation, -bound), bound))
    return weights


def weighted(advantages: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
    """Each row's advantages times its weight; a weight of 1 leaves every bit as it is."""
    return [values if weight == 1.0 else values * weight for values, weight in zip(advantages, weights, strict=True)]
