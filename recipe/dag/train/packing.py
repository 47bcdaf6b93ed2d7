"""Layout of rows in mini-batches: pure index arithmetic.

Invariant: every row is used once per epoch and none is dropped; the padding rows that make counts divisible have mask 0
everywhere, so they change neither loss nor gradient; the result depends only on the rows' lengths, order and the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

PAD = -1


def layout(
    lengths: list[int], *, ranks: int, mini_batches: int, micro_batch: int = 1, shuffle: str | None = None
) -> tuple[list[int], int]:
    """Order rows for `ranks` data-parallel ranks and up to `mini_batches` optimizer steps.

    Returns (order, mini_batches): indices into `lengths`, with PAD for a padding row. verl gives rank r the r-th equal
    part of the order and cuts each part into `mini_batches` equal pieces; the m-th pieces of all ranks are mini-batch
    m. Rows are dealt out longest first, back and forth, so that the pieces have about the same number of tokens. If a
    mini-batch would be empty, fewer are made. A piece is sorted by length and padded to a multiple of `micro_batch`
    rows, so that micro-batches of that many consecutive rows waste little on padding to their longest row. With the
    seed `shuffle`, rows of similar lengths are dealt out in another order."""
    if not lengths:
        raise ValueError("no rows to lay out")
    mini_batches = max(1, min(mini_batches, len(lengths) // ranks))
    pieces: list[list[int]] = [[] for _ in range(ranks * mini_batches)]
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rng = random.Random(shuffle)
    for start in range(0, len(by_length), len(pieces)):
        # rows of one lap have similar lengths, so the pieces stay balanced in whatever order a lap is dealt out
        lap = by_length[start : start + len(pieces)]
        targets = list(range(len(pieces)))
        if shuffle is not None:
            rng.shuffle(targets)
        elif start // len(pieces) % 2:
            targets.reverse()
        for index, target in zip(lap, targets, strict=False):
            pieces[target].append(index)
    # verl cuts the order by numbers of rows, so every piece has as many as the fullest one
    height = -(-max(len(piece) for piece in pieces) // micro_batch) * micro_batch
    order: list[int] = []
    for piece in pieces:
        order += [PAD] * (height - len(piece)) + sorted(piece, key=lambda i: (lengths[i], i))
    return order, mini_batches


def end_to_end(orders: Sequence[list[int]], ranks: int) -> list[int]:
    """Join layouts of equal length, one per epoch: each rank's part of the result is its parts of them in turn."""
    size = len(orders[0]) // ranks
    joined: list[int] = []
    for rank in range(ranks):
        for order in orders:
            joined += order[rank * size : (rank + 1) * size]
    return joined


def scatter_back(values: list, order: list[int], count: int) -> list:
    """Undo `layout`: return values in row order from values in layout order, without those of padding rows."""
    out = [None] * count
    for value, index in zip(values, order, strict=True):
        if index != PAD:
            out[index] = value
    return out
