"""An MLP with SwiGLU whose three layers have an adapter, on a GPU and in half precision.

Invariant: up to rounding, results and gradients are those of the layers one by one. The largest tensors of a layer are
gate, up and their product; the adapters' parts of the first two, and of the product's gradient, exist only in the
registers of the kernels that read these tensors anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from recipe.dag.policy.adapter_layers import (
    Active,
    differentiate_adapters,
    differentiate_input,
    fill_product,
    names_of,
    shrink,
)

GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Classes of transformers that compute down(act(gate(hidden)) * up(hidden)). A class of the same name in a model's own
code may compute something else."""
LAYERS = ("gate_proj", "up_proj", "down_proj")


def install(model: nn.Module, active: Active) -> None:
    """Make the model's MLPs compute an adapter of all their layers with the kernels. Only these instances change."""
    for mlp in model.modules():
        known = type(mlp).__name__ in GATED and type(mlp).__module__.startswith("transformers.models.")
        if known and isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation)):
            layers = [mlp.get_submodule(name) for name in LAYERS]
            if all(layer.bias is None for layer in layers):
                mlp.forward = partial(_forward, layers, active, mlp.forward)


def _forward(layers: list[nn.Module], active: Active, one_by_one: Callable, hidden: Tensor) -> Tensor:
    names = "weight", *names_of(active.name)
    weights = [[layer._parameters.get(name) for name in names] for layer in layers]
    if any(weight is None for each in weights for weight in each) or not _has_kernels(weights[0][0]):
        return one_by_one(hidden)
    return _Mlp.apply(hidden, active.scale, *[weight for each in weights for weight in each])


def _has_kernels(weight: Tensor | None) -> bool:
    return weight is not None and weight.is_cuda and weight.itemsize == 2


class _Mlp(torch.autograd.Function):
    """`weights`: W [out, in], A [rank, in] and B [out, rank] of gate, up and down. The backward pass overwrites what
    the forward pass kept, like that of Liger's SwiGLU, so that it can run only once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: float, *weights: Tensor) -> Tensor:
        from recipe.dag.policy import swiglu_kernel

        w, a, b = (weights[part::3] for part in range(3))
        flat, joined, low, b_inputs = shrink(hidden, w[0].dtype, a[:2], b[:2], scale)
        gate, up = flat @ w[0].T, flat @ w[1].T
        activated = swiglu_kernel.activate(gate, up, low, *b_inputs)
        activated, a_down, low_down, b_down = shrink(activated, w[0].dtype, a[2:], b[2:], scale)
        result = flat.new_empty(*hidden.shape[:-1], len(w[2]))
        fill_product(result, activated, w[2], None, low_down, *b_down)
        ctx.save_for_backward(flat, low, joined, gate, up, activated, low_down, a_down, *w, *b_inputs, *b_down)
        ctx.scale, ctx.shape = scale, hidden.shape
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from recipe.dag.policy import swiglu_kernel

        flat, low, joined, gate, up, activated, low_down, a_down, *weights = ctx.saved_tensors
        w, b = weights[:3], weights[3:]
        rows = grad.reshape(-1, grad.shape[-1])
        of_low_down, of_a_down, of_b_down = differentiate_adapters([rows], activated, low_down, b[2:], ctx.scale)
        swiglu_kernel.differentiate(rows @ w[2], gate, up, low, b[0], b[1], of_low_down, a_down)
        torch.autograd.graph.increment_version((gate, up))  # a second backward pass fails: autograd cannot see kernels
        of_low, of_a, of_b = differentiate_adapters([gate, up], flat, low, b[:2], ctx.scale)
        of_hidden = None
        if ctx.needs_input_grad[0]:
            of_hidden = differentiate_input([gate, up], w[:2], of_low, joined).view(ctx.shape)
        pairs = zip((*of_a, *of_a_down), (*of_b, *of_b_down), strict=True)
        return of_hidden, None, *[each for pair in pairs for each in (None, *pair)]
