"""Adapters of a generator's model: requests of several adapters, and of the model alone, in one batch.

Invariant: a request computes with the adapter that it names and no other; nothing is merged into the model, so that its
own requests and those of other adapters do not change when one is loaded or removed.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from recipe.dag.platform.adapter_weights import Pairs, read_adapter, target_layers
from recipe.dag.workflow.adapter_shape import ALL_LINEAR, AdapterShape


class ServedAdapters:
    """A and B of all adapters, side by side in each layer, and the columns that each row of a batch uses."""

    def __init__(self, model: PreTrainedModel):
        self.layers = target_layers(model, (ALL_LINEAR,))
        self.loaded: dict[str, tuple[AdapterShape, Pairs]] = {}
        self.columns: dict[str, slice] = {}
        self.used: slice | None = None
        """The columns that any row uses; None: the model alone computes."""
        self.weights: Tensor | float = 1.0
        """The factor of the used columns: one for all rows, or [rows, 1, columns]."""

    def read(self, folder: Path) -> tuple[AdapterShape, Pairs]:
        """Return an adapter for `add`. Raises UserError."""
        shape, pairs = read_adapter(folder, self.layers)
        return shape, {name: (a.float(), b.float()) for name, (a, b) in pairs.items()}

    def add(self, name: str, adapter: tuple[AdapterShape, Pairs]) -> None:
        self.loaded[name] = adapter
        self._arrange()

    def keep(self, names: Collection[str]) -> None:
        """Remove all adapters but these."""
        if stale := self.loaded.keys() - set(names):
            for name in stale:
                del self.loaded[name]
            self._arrange()

    def _arrange(self) -> None:
        """Lay the adapters side by side in every layer."""
        self.columns, width = {}, 0
        for name, (shape, _) in self.loaded.items():
            self.columns[name] = slice(width, width + shape.rank)
            width += shape.rank
        for name, layer in self.layers.items():
            state: Any = layer
            state.lora_a, state.lora_b = torch.zeros(width, layer.in_features), torch.zeros(layer.out_features, width)
            for adapter, (_, pairs) in self.loaded.items():
                if name in pairs:
                    state.lora_a[self.columns[adapter]], state.lora_b[:, self.columns[adapter]] = pairs[name]
            if "lora" not in vars(layer):
                state.lora, state.forward = self, types.MethodType(_forward, layer)

    def select(self, names: Sequence[str | None]) -> None:
        """Set the adapter of each row of the next forward passes; None: the model alone."""
        first = names[0]
        if any(name != first for name in names):
            self.used = slice(None)
            self.weights = torch.zeros(len(names), 1, sum(shape.rank for shape, _ in self.loaded.values()))
            for row, name in enumerate(names):
                if name is not None:
                    self.weights[row, 0, self.columns[name]] = self.loaded[name][0].scale
        elif first is None:
            self.used = None
        else:
            self.used, self.weights = self.columns[first], self.loaded[first][0].scale


def _forward(self: Any, hidden: Tensor) -> Tensor:
    out, adapters = linear(hidden, self.weight, self.bias), self.lora
    if adapters.used is None:
        return out
    return out + linear(linear(hidden, self.lora_a[adapters.used]) * adapters.weights, self.lora_b[:, adapters.used])
