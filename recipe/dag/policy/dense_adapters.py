"""Adapters as two products: over the columns of all adapters of a batch, and over those of a token's own.

Invariant: a token's output gets the product of its own adapter's matrices alone, times its scaling; a token of the base
gets none.

SGLang 0.5.12's own kernels loop over a layer's inputs within one block of threads, for each segment of a few tokens.
cuBLAS multiplies by the A of all adapters, whose columns are few beside the layer's own, and one kernel
(`adapter_kernel`) by the B of a token's adapter. A layer's own matrix has A as more rows, with which the CUDA graphs of
decoding multiply at once: such a batch waits for memory to be read, so that the rows cost nothing. Prompts take two
products, with or without a CUDA graph: the output of one would have to be copied without A's columns, which takes
memory. The largest output is that of an MLP's first layer, gate and up, of which the activation makes half as much: one
kernel adds the adapters' part and computes the activation, so that the sum is neither written nor read.

SGLang's pool pads each adapter to the largest rank. The products read copies without that padding (`adapter_columns`),
whose shapes and addresses CUDA graphs hold. A batch that needs more columns than there are, as with two versions of
each adapter, is computed from the pool, one adapter after the other and without a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from recipe.dag.policy.adapter_columns import TILE, Columns, Span, tiles_of
from recipe.dag.workflow.adapter_shape import STEP


class Adapter(NamedTuple):
    place: int
    """In SGLang's pool."""
    rank: int
    scaling: float


class Layer:
    """The matrices of one layer, which has one pair of them for each of its parts (q, k and v)."""

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        ends: Sequence[int],
        columns: int,
        stacked: torch.Tensor | None = None,
    ):
        """`a`: SGLang's buffer [places, parts * largest rank, in]; an adapter of a smaller rank has its parts at the
        beginning, one after the other. `b`: [places, out, largest rank]. `ends`: 0 and the parts' ends in `out`.
        `stacked` [out + parts * columns, in]: the layer's own matrix, and room for A below it."""
        self.a, self.b, self.parts = a, b, list(pairwise(map(int, ends)))
        shape = (len(self.parts), columns, a.shape[2])
        self.rows_a = a.new_zeros(shape) if stacked is None else stacked[b.shape[1] :].view(shape)
        self.rows_b = b.new_zeros(columns, b.shape[1])
        """Times the scaling. An output has the columns of its own part alone."""
        self.h: torch.Tensor | None = None
        """What `sglang_adapters.Stacked` computed [tokens, parts * columns], until `Products.shrink` returns it."""
        self.is_gated = False
        """Whether `Products.gate` follows `Products.expand`, which then leaves the work to it."""
        self.pending: torch.Tensor | None = None
        """The input of `expand` that `gate` is to multiply by B."""

    def load(self, adapter: Adapter, columns: Span) -> None:
        """Copy an adapter that is in the pool into its columns."""
        place, rank, scaling = adapter
        start, filled, end = columns.start, columns.start + rank, columns.end
        self.rows_a[:, start:filled] = self.a[place, : len(self.parts) * rank].unflatten(0, (-1, rank))
        self.rows_b[start:filled] = self.b[place, :, :rank].T * scaling
        self.rows_a[:, filled:end] = self.rows_b[filled:end] = 0


class Tiles(NamedTuple):
    """Where CUDA graphs read the tiles of each batch."""

    tokens: int
    """Of the largest graph."""
    table: torch.Tensor
    """As `tiles_of` returns it."""


class Products:
    """The products of one batch after another."""

    def __init__(self, columns: int, groups: int, device: torch.device | str):
        """`columns`: those that the adapters of a batch usually have together. `groups`: the most adapters that a batch
        has, and one for the base, which has the free rows of a graph, too."""
        self.columns, self.groups, self.device = Columns(columns), groups, torch.device(device)
        self.layers: dict[int, Layer] = {}
        """Address of SGLang's A, and of its B -> the layer."""
        self.tiles = torch.empty(0, TILE + 2, dtype=torch.int32, device=self.device)
        """Of the batch, as `tiles_of` returns them."""
        self.captured = self.captured_prompts = Tiles(0, self.tiles)
        """Of CUDA graphs of decoding, and of prompts."""
        self.one_by_one: list[tuple[torch.Tensor, Adapter]] | None = None
        """The rows of an adapter's tokens; None: computed in columns."""
        self.in_graph = False
        """Whether the batch is computed in columns, by a CUDA graph of decoding."""

    def add(self, a: torch.Tensor, b: torch.Tensor, ends: Sequence[int], stacked: torch.Tensor | None = None) -> Layer:
        """Add a layer, as `Layer` takes it."""
        layer = Layer(a, b, ends, self.columns.number, stacked)
        self.layers[a.data_ptr()] = self.layers[b.data_ptr()] = layer
        return layer

    def capture(self, tokens: int) -> None:
        """Make room for CUDA graphs of decoding, of at most so many tokens."""
        self.captured = self._idle(tokens)

    def capture_prompts(self, tokens: int) -> None:
        """Make room for CUDA graphs of prompts, of at most so many tokens, and prepare a batch of the base."""
        self.captured_prompts = self._idle(tokens)
        self.prepare([None], [tokens], {}, in_graph=False)

    def _idle(self, tokens: int) -> Tiles:
        """Return tiles without tokens."""
        shape = (tokens // TILE + self.groups, TILE + 2)
        return Tiles(tokens, torch.full(shape, -1, dtype=torch.int32, device=self.device))

    def prepare(
        self,
        requests: Sequence[str | None],
        lengths: Sequence[int] | None,
        adapters: Mapping[str, Adapter],
        *,
        in_graph: bool,
    ) -> None:
        """`requests`: the id of each one's adapter; None: the base. `lengths`: its tokens, by default 1. `adapters`:
        those of the batch. `in_graph`: whether a CUDA graph of decoding computes the batch."""
        self.in_graph = False
        tokens = len(requests) if lengths is None else sum(lengths)
        captured = self.captured if in_graph else self.captured_prompts
        new = self.columns.take({name: adapter.rank for name, adapter in adapters.items()})
        if new is None:
            lengths = [1] * len(requests) if lengths is None else lengths
            owner = [name for name, length in zip(requests, lengths, strict=True) for _ in range(length)]
            rows = {name: [row for row, each in enumerate(owner) if each == name] for name in adapters}
            self.one_by_one = [
                (torch.tensor(rows[name], device=self.device), adapter) for name, adapter in adapters.items()
            ]
            return
        self.one_by_one = None
        if new:
            self._load({name: adapters[name] for name in new})
        self.in_graph = in_graph
        spans = {name: self.columns.held[name] for name in adapters}
        fits = tokens <= captured.tokens
        sizes = {"rows": captured.tokens, "number": len(captured.table)} if fits else {}
        table = torch.from_numpy(tiles_of(requests, lengths, spans, **sizes))
        if self.device.type == "cuda":
            table = table.pin_memory()
        if fits:
            self.tiles = captured.table.copy_(table, non_blocking=True)
        else:
            self.tiles = table.to(self.device, non_blocking=True)

    def shrink(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Return the input of `expand`, [tokens, _], for `x` [tokens, in]."""
        layer = self.layers[a.data_ptr()]
        if layer.h is not None:
            h, layer.h = layer.h, None
            return h
        parts = len(layer.parts)
        if self.one_by_one is None:
            return x @ layer.rows_a.flatten(0, 1).T
        h = x.new_empty(len(x), parts * max((adapter.rank for _, adapter in self.one_by_one), default=1))
        for rows, (place, rank, _) in self.one_by_one:
            h[rows, : parts * rank] = x[rows] @ a[place, : parts * rank].T
        return h

    def expand(self, h: torch.Tensor, b: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return `output` [tokens, out] with the adapters' part, contiguous; in place, if `output` is. Of a layer with
        `is_gated`, whose adapters have columns, return `output` itself."""
        layer = self.layers[b.data_ptr()]
        if self.one_by_one is None:
            if layer.is_gated:
                layer.pending = h
                return output
            return self._expand_columns(h, layer, output)
        for rows, (place, rank, scaling) in self.one_by_one:
            for number, (start, end) in enumerate(layer.parts):
                own = h[rows, number * rank : (number + 1) * rank]
                output[rows, start:end] = output[rows, start:end].addmm_(
                    own, b[place, start:end, :rank].T, alpha=scaling
                )
        return output

    def gate(self, output: torch.Tensor, layer: Layer, activation: nn.Module) -> torch.Tensor:
        """Return SwiGLU [tokens, out / 2], as `activation` computes it, of what `expand` returned [tokens, out] and the
        adapters' part."""
        if layer.pending is None:
            return activation(output)
        h, layer.pending = layer.pending, None
        if _has_kernel(output):
            from recipe.dag.policy.adapter_kernel import add_product_and_gate

            return add_product_and_gate(h, layer.rows_b, output, self._tiles(len(h)))
        return activation(self._expand_columns(h, layer, output))

    def _expand_columns(self, h: torch.Tensor, layer: Layer, output: torch.Tensor) -> torch.Tensor:
        if _has_kernel(output) and len(layer.parts) <= 3:
            from recipe.dag.policy.adapter_kernel import add_product

            return add_product(h, layer.rows_b, output, self._tiles(len(h)), [end for _, end in layer.parts])
        output, own = output.contiguous(), self._own(len(h))
        for columns, (start, end) in zip(h.split(self.columns.number, 1), layer.parts, strict=True):
            output[:, start:end].addmm_(columns.where(own, 0), layer.rows_b[:, start:end])
        return output

    def _tiles(self, tokens: int) -> torch.Tensor:
        """Return the batch's, or those of a CUDA graph of so many tokens."""
        return self.tiles[: tokens // TILE + self.groups]

    def _own(self, tokens: int) -> torch.Tensor:
        """Return which columns are those of a token's adapter, [tokens, columns]."""
        rows, steps = self._tiles(tokens).split([TILE, 2], 1)
        step = torch.arange(self.columns.number, device=self.device) // STEP
        of_tile = (step >= steps[:, :1]) & (step < steps.sum(1, keepdim=True))
        own = of_tile.new_zeros(tokens + 1, self.columns.number)
        own[rows.where((rows >= 0) & (rows < tokens), tokens)] = of_tile[:, None]
        return own[:tokens]

    def _load(self, adapters: Mapping[str, Adapter]) -> None:
        """Copy adapters that have been given columns."""
        for layer in {*self.layers.values()}:
            for name, adapter in adapters.items():
                layer.load(adapter, self.columns.held[name])


def _has_kernel(output: torch.Tensor) -> bool:
    return output.is_cuda and output.itemsize == 2  # fp32 exceeds the kernels' registers
