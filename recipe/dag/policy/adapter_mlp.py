"""An MLP with SwiGLU whose three layers have an adapter, on a GPU.

Invariant: results and gradients are those of the layers one by one. The largest tensors of a layer are gate, up and
their product; the adapters' parts of the first two, and of the product's gradient, exist only in the registers of the
kernels that read these tensors anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipe.dag.policy.adapter_layers import Active, add_to_product, differentiate_group

GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Classes of transformers that compute down(act(gate(hidden)) * up(hidden)). Those of a model's own code may not."""
LAYERS = ("gate_proj", "up_proj", "down_proj")


def install(model: Any, active: Active) -> None:
    """Make the model's MLPs compute an adapter of all their layers with the kernels. Only these instances change."""
    for mlp in model.modules():
        kind = type(mlp)
        known = kind.__name__ in GATED and kind.__module__.startswith("transformers.models.")
        if known and mlp.config.hidden_act == "silu":
            layers = [mlp.get_submodule(name) for name in LAYERS]
            if all(layer.bias is None for layer in layers):
                mlp.forward = partial(_forward, layers, active, mlp.forward)


def _forward(layers: list[nn.Module], active: Active, one_by_one: Callable, hidden: Tensor) -> Tensor:
    weights = [[layer._parameters.get(name) for name in active.weights] for layer in layers]
    if any(weight is None for each in weights for weight in each) or not _has_kernels(weights[0][0]):
        return one_by_one(hidden)
    return _Mlp.apply(hidden, active.scale, *[weight for each in weights for weight in each])


def _has_kernels(weight: Tensor | None) -> bool:
    return weight is not None and weight.is_cuda and weight.itemsize == 2


class _Mlp(torch.autograd.Function):
    """`weights`: W [out, in], A [rank, in] and B [out, rank] of gate, up and down. The backward pass overwrites what
    the forward pass kept, so that it can run only once, like that of Liger's SwiGLU."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: float, *weights: Tensor) -> Tensor:
        from recipe.dag.policy import swiglu_kernel

        w, a, b = (weights[part::3] for part in range(3))
        flat, joined = hidden.reshape(-1, hidden.shape[-1]).to(w[0].dtype), torch.cat(a[:2]).to(w[0].dtype)
        a_down, b = a[2].to(w[0].dtype), [each.to(w[0].dtype) for each in b]
        low = (flat @ joined.T).mul_(scale)
        gate, up = flat @ w[0].T, flat @ w[1].T
        activated = swiglu_kernel.activate(gate, up, low, b[0], b[1])
        low_down = (activated @ a_down.T).mul_(scale)
        result = flat.new_empty(*hidden.shape[:-1], len(w[2]))
        add_to_product(result, activated, w[2], None, low_down, b[2])
        ctx.save_for_backward(flat, low, joined, gate, up, activated, low_down, a_down, *w, *b)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from recipe.dag.policy import swiglu_kernel

        flat, low, joined, gate, up, activated, low_down, a_down, *weights = ctx.saved_tensors
        w, b = weights[:3], weights[3:]
        rows = grad.reshape(-1, grad.shape[-1])
        of_low_down = (rows @ b[2]).mul_(ctx.scale)
        of_a_down, of_b_down = of_low_down.T @ activated, rows.T @ low_down
        swiglu_kernel.differentiate(rows @ w[2], gate, up, low, b[0], b[1], of_low_down, a_down)
        of_hidden, of_a, of_b = differentiate_group(
            [gate, up], flat, low, joined, w[:2], b[:2], ctx.scale, needs_hidden=ctx.needs_input_grad[0]
        )
        if of_hidden is not None:
            of_hidden = of_hidden.view(*grad.shape[:-1], flat.shape[-1])
        pairs = zip((*of_a, of_a_down), (*of_b, of_b_down), strict=True)
        return of_hidden, None, *[each for pair in pairs for each in (None, *pair)]
