"""Lower weights for an agent's part of a row if the policy was unsure of it (UMAD, arXiv 2603.01221).

Invariant: weights are positive, so an advantage keeps its sign. The weight is 1 for a part with the mean surprise of
its group, for a group of one, and in a group without differences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import compress

from recipe.dag.credit.group import all_equal


def surprise(log_probs: Sequence[float], mask: Sequence[int]) -> float | None:
    """Return the mean negative log-prob (nats) of the sampled tokens under the policy that sampled them; None if
    there are none."""
    sampled = sum(mask)
    return -sum(compress(log_probs, mask)) / sampled if sampled else None


def uncertainty_weights(
    surprises: Sequence[float | None], group: Sequence[Hashable], *, alpha: float, bound: float
) -> list[float]:
    """Return [P] weights exp(-alpha z), where z is the part's surprise in sample standard deviations (n - 1) from the
    mean of its group, clipped to [-bound, bound]. Parts without sampled tokens (None) weigh 1 and are not part of the
    statistics. `group` [P]: equal for parts of one group."""
    groups: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for part, (value, key) in enumerate(zip(surprises, group, strict=True)):
        if value is not None:
            groups[key][part] = value
    weights = [1.0] * len(surprises)
    for members in groups.values():
        if len(members) < 2 or all_equal(members.values()):
            continue
        mean = math.fsum(members.values()) / len(members)
        squares = math.fsum((value - mean) ** 2 for value in members.values())
        deviation = math.sqrt(squares / (len(members) - 1))
        # exp of a bounded z: one outlier can neither silence its part nor take over the loss
        for part, value in members.items():
            z = (value - mean) / deviation
            weights[part] = math.exp(-alpha * min(max(z, -bound), bound))
    return weights
