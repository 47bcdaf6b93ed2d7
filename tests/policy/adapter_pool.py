"""SGLang's buffers of adapters, and one of its layers, for tests of the products."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from recipe.dag.policy.dense_adapters import Adapter

RANK, IN, ENDS = 8, 6, (0, 5, 8, 9)
PARTS, OUT = len(ENDS) - 1, ENDS[-1]


class Pool:
    """SGLang's buffers of one layer of some parts, and adapters in them, drawn at random."""

    max_loras_per_batch, max_lora_rank, target_modules = 4, RANK, {"qkv_proj", "gate_up_proj"}

    def __init__(self, ends: tuple[int, ...] = ENDS):
        self.ends, self.parts = ends, len(ends) - 1
        self.draw = torch.Generator().manual_seed(0)
        self.a = torch.zeros(self.max_loras_per_batch, self.parts * RANK, IN)
        self.b = torch.zeros(self.max_loras_per_batch, ends[-1], RANK)
        self.adapters: dict[str, Adapter] = {}
        self.pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def load(self, name: str, place: int, rank: int, scaling: float) -> None:
        """As SGLang: what an adapter of a larger rank left behind stays."""
        pairs = []
        for start, end in pairwise(self.ends):
            pairs.append(
                (torch.randn(rank, IN, generator=self.draw), torch.randn(end - start, rank, generator=self.draw))
            )
        self.a[place, : self.parts * rank] = torch.cat([a for a, _ in pairs])
        self.b[place, :, :rank] = torch.cat([b for _, b in pairs])
        self.pairs[name], self.adapters[name] = pairs, Adapter(place, rank, scaling)

    def of(self, requests: list[str | None]) -> dict[str, Adapter]:
        return {name: self.adapters[name] for name in requests if name is not None}

    def get_tensor(self, target_module: str, layer_id: int, lora_type: str) -> torch.Tensor:
        return {"A": self.a, "B": self.b}[lora_type]

    def expected(self, x: torch.Tensor, owners: list[str | None]) -> torch.Tensor:
        rows = []
        for row, name in zip(x, owners, strict=True):
            pairs = [] if name is None else self.pairs[name]
            parts = [self.adapters[name].scaling * (b @ (a @ row)) for a, b in pairs]
            rows.append(torch.cat(parts or [row.new_zeros(self.ends[-1])]))
        return torch.stack(rows)


class Linear:
    """SGLang's layer with a bias, and its method."""

    def __init__(self):
        self.bias = torch.randn(OUT)

    def apply(self, module: Linear, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, module.weight, bias)
