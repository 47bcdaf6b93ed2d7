"""Weights of adapters: the layers that they change, and their PEFT folders.

Invariant: the names of A and B are PEFT's, so that other programs read the folders; a folder with weights that no layer
of the model takes is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.adapter_shape import ALL_LINEAR, CONFIG, WEIGHTS, AdapterShape, read_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Name of a linear layer in the model -> A [rank, inputs] and B [outputs, rank]."""
_PREFIX = "base_model.model."


def target_layers(model: PreTrainedModel, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Return the linear layers of a model that an adapter with these targets changes, in the model's order. Raises
    UserError for a target that is none of them."""
    head = model.get_output_embeddings()
    linear = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    if targets == (ALL_LINEAR,):
        return linear
    known = {name.rpartition(".")[2] for name in linear}
    if unknown := [target for target in targets if target not in known]:
        raise UserError(f"{type(model).__name__} has no linear layer `{unknown[0]}`; it has {', '.join(sorted(known))}")
    return {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in targets}


def write_adapter(folder: Path, shape: AdapterShape, pairs: Pairs, base: str) -> None:
    """Write a PEFT folder. `base`: the model, for PEFT's programs."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _named(pairs).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        # not PEFT's "all-linear", whose meaning depends on the reader
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1))


class MappedWeights:
    """The weights in a PEFT folder, as memory that is their file's: to get the pages of another file takes longer than
    to fill them."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        file = folder / WEIGHTS
        content = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)
        start = 8 + int(content[:8].view(torch.int64))  # of safetensors: the header's length, the header, the values
        header = json.loads(bytes(content[8:start].numpy()))
        del header["__metadata__"]
        self.names = sorted(header, key=lambda name: header[name]["data_offsets"])
        self.values = content[start:].view(dtype)

    def fill(self, pairs: Pairs) -> None:
        """Replace the weights by others of the same shapes, on any device."""
        tensors = _named(pairs)
        self.values.copy_(torch.cat([tensors[name].flatten() for name in self.names]).to(self.values.dtype))


def _named(pairs: Pairs) -> dict[str, Tensor]:
    """Return A and B by PEFT's names."""
    parts = ((name, part, tensor) for name, pair in pairs.items() for part, tensor in zip("AB", pair, strict=True))
    return {f"{_PREFIX}{name}.lora_{part}.weight": tensor for name, part, tensor in parts}


def read_adapter(folder: Path, layers: Mapping[str, nn.Linear]) -> tuple[AdapterShape, Pairs]:
    """Return the shape and the weights of a PEFT folder for a model that has these linear layers. Raises UserError."""
    shape = read_shape(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be read ({error})") from error
    pairs: Pairs = {}
    for name, layer in layers.items():
        pair = [tensors.pop(f"{_PREFIX}{name}.lora_{part}.weight", None) for part in "AB"]
        if pair[0] is None and pair[1] is None:
            continue
        a, b = (torch.empty(0) if tensor is None else tensor for tensor in pair)
        if a.shape != (shape.rank, layer.in_features) or b.shape != (layer.out_features, shape.rank):
            raise UserError(f"{folder}: the weights of {name} are missing or do not fit the model at rank {shape.rank}")
        pairs[name] = (a, b)
    if tensors or not pairs:
        stray = next(iter(tensors), "any weights")
        raise UserError(f"{folder}: the model has no layer for {stray}; this is an adapter of another model")
    return shape, pairs


@torch.no_grad()
def merge(model: PreTrainedModel, folder: Path) -> None:
    """Add the adapter in a PEFT folder to the weights of its base, in place; the sum is computed in fp32."""
    layers = target_layers(model, (ALL_LINEAR,))
    shape, pairs = read_adapter(folder, layers)
    for name, (a, b) in pairs.items():
        weight = layers[name].weight
        weight.copy_(weight.float() + shape.scale * (b.float() @ a.float()))
