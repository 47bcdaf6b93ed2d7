"""Recompute of a layer's MLP only, or of nothing, in place of the whole layer, as transformers does.

Invariant: values and gradients do not change. The MLP's activations are most of a layer's, and attention the most
expensive to compute again for its size. `recipe.dag.workflow.trainer_memory` says what the other activations take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PRE_NORM = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""Children of a layer whose MLP reads only the norm after its attention (Llama, Mistral, Qwen2, Qwen3)."""


def install(model: Any, mlp_only: int, nothing: int) -> None:
    """Make the last `nothing` layers of a transformers model recompute nothing, and of the others the first `mlp_only`
    their MLP only, if they have an `mlp`. Only these instances change, not their classes."""
    layers = getattr(model.base_model, "layers", ())
    recomputed = max(len(layers) - nothing, 0)
    for layer in layers[recomputed:]:  # the last ones: the backward pass frees theirs first
        layer.gradient_checkpointing = False
    for layer in layers[: min(mlp_only, recomputed)]:
        if hasattr(layer, "mlp"):
            layer.gradient_checkpointing = False
            _recompute_mlp(layer)


def _recompute_mlp(layer: Any) -> None:
    run = layer.mlp.forward
    if {name for name, _ in layer.named_children()} == PRE_NORM:
        # the norm is recomputed, too: its input is kept for its gradient anyway, and then its output need not be
        norm = layer.post_attention_layernorm
        run = _in_turn(norm.forward, run)
        norm.forward = lambda hidden: hidden
    layer.mlp.forward = partial(_recomputed, layer, run)


def _in_turn(first: Callable, second: Callable) -> Callable:
    return lambda hidden: second(first(hidden))


def _recomputed(layer: nn.Module, run: Callable, hidden: Tensor) -> Tensor:
    if not (layer.training and torch.is_grad_enabled()):
        return run(hidden)
    return checkpoint(run, hidden, use_reentrant=False)  # pyright: ignore[reportReturnType]
