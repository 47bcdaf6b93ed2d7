"""How rows become mini-batches: pure index arithmetic.

Invariant: every row is used once per epoch and none is dropped; what is added to make the counts divisible has mask 0
everywhere, so no loss and no gradient changes; the result depends on the rows' lengths, their order and the seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

PAD = -1


def layout(
    lengths: list[int], *, ranks: int, mini_batches: int, micro_batch: int = 1, shuffle: str | None = None
) -> tuple[list[int], int]:
    """Order rows for `ranks` data-parallel ranks and up to `mini_batches` optimizer steps.

    Returns (order, mini_batches): indices into `lengths`, PAD for a padding row. verl gives rank r the r-th equal part
    of the order and cuts each part into `mini_batches` equal pieces; piece m of every rank makes mini-batch m. Rows are
    dealt out longest first, back and forth, so that the pieces weigh about the same. Fewer mini-batches are made where
    one would hold no row at all. A piece is sorted by length and padded to a multiple of `micro_batch` rows, so that
    micro-batches of that many consecutive rows waste little on padding to their longest. `shuffle`: a seed by which
    rows of about the same length are dealt to other pieces."""
    if not lengths:
        raise ValueError("no rows to lay out")
    mini_batches = max(1, min(mini_batches, len(lengths) // ranks))
    pieces: list[list[int]] = [[] for _ in range(ranks * mini_batches)]
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    draw = random.Random(shuffle)
    for start in range(0, len(by_length), len(pieces)):
        # rows of one lap are about as long as each other, so that pieces stay balanced however a lap is dealt out
        lap = by_length[start : start + len(pieces)]
        targets = list(range(len(pieces)))
        if shuffle is not None:
            draw.shuffle(targets)
        elif start // len(pieces) % 2:
            targets.reverse()
        for index, target in zip(lap, targets, strict=False):
            pieces[target].append(index)
    height = -(-max(len(piece) for piece in pieces) // micro_batch) * micro_batch
    order = [
        i for piece in pieces for i in [PAD] * (height - len(piece)) + sorted(piece, key=lambda i: (lengths[i], i))
    ]
    return order, mini_batches


def end_to_end(orders: Sequence[list[int]], ranks: int) -> list[int]:
    """Join layouts of equal length, one per epoch, so that each rank's part holds its parts of all of them in turn."""
    size = len(orders[0]) // ranks
    return [i for rank in range(ranks) for order in orders for i in order[rank * size : (rank + 1) * size]]


def scatter_back(values: list, order: list[int], count: int) -> list:
    """Undo `layout`: values in layout order -> values in row order, padding left out."""
    out = [None] * count
    for value, index in zip(values, order, strict=True):
        if index != PAD:
            out[index] = value
    return out
