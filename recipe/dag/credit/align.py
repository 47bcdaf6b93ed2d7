"""A fixed number of calls per episode out of a varying one (M-GRPO, arXiv 2511.13288).

Invariant: the weights of what is kept add up, in expectation over the draw, to 1 for every call, so the expected
gradient is the one of all calls, each taken once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def align(calls: Sequence[int], count: int, *, seed: int) -> list[tuple[int, float]]:
    """`count` pairs (call, weight) out of one episode's calls; none if it has none. More calls than `count`: a draw
    without replacement, each weighing len(calls) / count. Fewer: all of them, some repeated, the repetitions of a call
    sharing weight 1."""
    if count < 1:
        raise ValueError(f"count: {count} is not at least 1")
    rng, have = random.Random(f"align {seed}"), len(calls)
    if not have:
        return []
    if have >= count:
        return [(call, have / count) for call in rng.sample(list(calls), count)]
    repeated = rng.sample(range(have), count % have)
    times = [count // have + (index in repeated) for index in range(have)]
    return [(call, 1.0 / n) for call, n in zip(calls, times, strict=True) for _ in range(n)]
