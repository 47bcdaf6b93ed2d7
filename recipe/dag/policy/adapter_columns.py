"""Which columns of a server's products an adapter has, and which tokens of a batch are computed together.

Invariant: an adapter's columns follow each other, and the tokens of a tile have the same adapter. Both depend on the
batches alone, so that they are the same on all ranks of a server, which add up what they computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipe.dag.workflow.adapter_shape import STEP, columns_of

TILE = 64
"""Tokens that a block of a GPU's threads computes."""


class Span(NamedTuple):
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class Columns:
    """Which adapter has which columns."""

    def __init__(self, number: int):
        self.number = number
        self.held: dict[str, Span] = {}
        """SGLang's id of an adapter, which names one version -> its columns; the least recently used is the first."""

    def take(self, ranks: Mapping[str, int]) -> list[str] | None:
        """Give the adapters of a batch their columns, if need be those of others. Return those whose columns are new;
        None, and no change, if the batch needs more than there are."""
        sizes = {name: columns_of(rank) for name, rank in ranks.items()}
        if sum(sizes.values()) > self.number:
            return None
        for name in ranks:
            if name in self.held:
                self.held[name] = self.held.pop(name)
        new = [name for name in ranks if name not in self.held]
        for name in new:
            start = self._room(sizes[name], ranks)
            if start is None:  # in pieces: all move together
                starts = accumulate(sizes.values(), initial=0)
                self.held = dict(zip(sizes, map(Span, starts, sizes.values()), strict=True))
                return [*ranks]
            self.held[name] = Span(start, sizes[name])
        return new

    def _room(self, size: int, kept: Mapping[str, int]) -> int | None:
        """Return where so many free columns begin, after others than `kept` have lost theirs if need be."""
        while True:
            start = 0
            for span in sorted([*self.held.values(), Span(self.number, 0)]):
                if span.start - start >= size:
                    return start
                start = span.end
            victim = next((name for name in self.held if name not in kept), None)
            if victim is None:
                return None
            del self.held[victim]


def tiles_of(
    requests: Sequence[str | None],
    lengths: Sequence[int] | None,
    spans: Mapping[str, Span],
    *,
    rows: int | None = None,
    number: int | None = None,
) -> NDArray[np.int32]:
    """Return [tiles, TILE + 2]: a tile's tokens, -1 in free places; where its adapter's columns begin, and how many
    these are, both in steps: 0 for the base, -1 for a tile without tokens.

    requests: the adapter of each one; None: the base
    lengths: its tokens, by default 1
    spans: of the batch's adapters
    rows: the tokens of a CUDA graph, by default the batch's; the last ones are the base's
    number: of tiles, by default as many as are needed: rows // TILE, and one for each adapter and the base, at most
    """
    groups = {name: group for group, name in enumerate([*spans, None])}
    owner = np.array([groups[name] for name in requests], dtype=np.int64).repeat(1 if lengths is None else lengths)
    owner = np.append(owner, np.full((rows or len(owner)) - len(owner), len(spans)))
    counts = np.bincount(owner, minlength=len(groups))
    tiles = -(-counts // TILE)
    used = tiles.sum()
    table = np.full((used if number is None else number, TILE + 2), -1, dtype=np.int32)
    skipped = TILE * (tiles.cumsum() - tiles) - (counts.cumsum() - counts)
    slot = np.arange(len(owner)) + skipped.repeat(counts)
    table[slot // TILE, slot % TILE] = owner.argsort(kind="stable")
    steps = np.array([*spans.values(), Span(0, 0)]) // STEP
    table[:used, TILE:] = steps.repeat(tiles, axis=0)
    return table
