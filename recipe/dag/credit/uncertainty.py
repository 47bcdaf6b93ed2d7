"""Less weight for what the policy was unsure of (UMAD, arXiv 2603.01221).

Invariant: the weight is positive, so an advantage keeps its sign, and it is 1 for a row that is as sure as its group on
average, for a group of one, and for a group that is equally sure throughout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from torch import Tensor


def uncertainty_weighted(
    advantages: Sequence[Tensor],
    log_probs: Sequence[Tensor],
    mask: Sequence[Tensor],
    group: Sequence[Hashable],
    *,
    alpha: float = 0.25,
    bound: float = 5.0,
) -> list[Tensor]:
    """A * exp(-alpha z), one tensor per row, where z is the row's mean negative log-prob over its sampled tokens, in
    standard deviations (n - 1) from the mean of its group, at most `bound` away. Rows without sampled tokens count in
    no group."""
    groups: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for index, (values, sampled, name) in enumerate(zip(log_probs, mask, group, strict=True)):
        if sampled.any():
            groups[name][index] = -values.double()[sampled.bool()].mean().item()
    weights = [1.0] * len(advantages)
    for members in groups.values():
        mean = math.fsum(members.values()) / len(members)
        squares = math.fsum((value - mean) ** 2 for value in members.values())
        if len(members) > 1 and not math.isclose(min(members.values()), max(members.values()), rel_tol=1e-12):
            deviation = math.sqrt(squares / (len(members) - 1))
            for index, value in members.items():
                weights[index] = math.exp(-alpha * min(max((value - mean) / deviation, -bound), bound))
    return [values * weight for values, weight in zip(advantages, weights, strict=True)]
