"""Recompute of a layer's MLP only, in place of the whole layer, as transformers does.

Invariant: values and gradients do not change. The MLP's activations are most of a layer's, and attention the most
expensive to compute again for its size. `recipe.dag.workflow.trainer_memory` says what the other activations take.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PRE_NORM = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""Children of a layer whose MLP reads only the norm after its attention (Llama, Mistral, Qwen2, Qwen3)."""


def install(model: nn.Module, layers: int) -> None:
    """Make the first `layers` layers of a model recompute their MLP only. Only these instances change, not their
    classes."""
    for layer in model.base_model.layers[:layers]:
        layer.gradient_checkpointing = False
        _recompute_mlp(layer)


def _recompute_mlp(layer: nn.Module) -> None:
    run = layer.mlp.forward
    if {name for name, _ in layer.named_children()} == PRE_NORM:
        # the norm is recomputed, too: its input is kept for its gradient anyway, and then its output need not be
        norm = layer.post_attention_layernorm
        run = _in_turn(norm.forward, run)
        norm.forward = _unchanged
    layer.mlp.forward = partial(_recomputed, layer, run)


def _in_turn(first, second):
    return lambda hidden: second(first(hidden))


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _recomputed(layer: nn.Module, run, hidden: Tensor) -> Tensor:
    if not (layer.training and torch.is_grad_enabled()):
        return run(hidden)
    return checkpoint(run, hidden, use_reentrant=False)
