"""Adapters in the linear layers of a frozen model, and the value heads of critics on it.

Invariant: with adapter B A and its scale, a layer computes hidden W^T + bias + scale (hidden A^T) B^T, and gradients of
`hidden`, A and B only. Layers that read the same input are computed together, so that the products with their A, the
sums of their inputs' gradients and the gradients of A read and write it once: such a product has `rank` columns and
takes as long as memory takes to deliver what it reads.
"""

from __future__ import annotations

import types
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_outputs import TokenClassifierOutput

from recipe.dag.platform.adapter_weights import read_adapter, target_layers
from recipe.dag.policy.adapter_config import TrainedAdapter

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one parent that models call with the same tensor."""


class Active:
    """The adapter with which the layers compute; shared by all of them. No module, so that no state dict has it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.scale = 1.0


def names_of(adapter: str | None) -> tuple[str, str]:
    """Return the names that a layer has for an adapter's A and B."""
    return f"lora_A_{adapter}", f"lora_B_{adapter}"


def install(model: Any, adapters: tuple[TrainedAdapter, ...], *, seed: int) -> Active:
    """Freeze the model, and give the adapters' layers their A and B. Only these instances change."""
    model.requires_grad_(False)
    active, adapted = Active(), set()
    for adapter in adapters:
        rank = adapter.shape.rank
        layers = target_layers(model, adapter.shape.targets)
        draw = torch.Generator().manual_seed(zlib.crc32(adapter.name.encode()) << 16 ^ seed)
        pairs = read_adapter(Path(adapter.start), layers)[1] if adapter.start is not None else {}
        for name, layer in layers.items():
            # as PEFT: B is 0, and A uniform in +-1 / sqrt(inputs)
            bound = layer.in_features**-0.5
            a = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=draw)
            a, b = pairs.get(name, (a, torch.zeros(layer.out_features, rank)))
            for own, tensor in zip(names_of(adapter.name), (a, b), strict=True):
                # on the layer's device, which is `meta` on ranks that get their weights from rank 0
                layer.register_parameter(own, nn.Parameter(tensor.to(layer.weight.device, torch.float32)))
        adapted |= set(layers.values())
    for parent in model.modules():
        inputs: defaultdict[Any, list[nn.Linear]] = defaultdict(list)
        for name, layer in parent.named_children():
            if layer in adapted:
                shared = next((names for names in SAME_INPUT if name in names), name)
                inputs[shared, layer.in_features].append(layer)
        for group in inputs.values():
            _Group(group, active)
    return active


def install_heads(model: Any, critics: list[str], active: Active) -> None:
    """Give the model a value head of zeros for each critic, and its forward pass the values of the critic in use."""
    width, device = model.config.get_text_config().hidden_size, model.get_output_embeddings().weight.device
    for name in critics:
        for part, shape in (("weight", (1, width)), ("bias", (1,))):
            model.register_parameter(f"value_{part}_{name}", nn.Parameter(torch.zeros(shape, device=device)))
    score = model.forward

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        if active.name not in critics:
            return score(*args, **inputs)
        head = (getattr(self, f"value_{part}_{active.name}").float() for part in ("weight", "bias"))
        hidden = self.base_model(*args, **inputs).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):  # which would round the values to bf16
            values: Any = linear(hidden.float(), *head)
        return TokenClassifierOutput(logits=values)  # FSDP looks for tensors in classes that torch's pytrees know

    model.forward = types.MethodType(forward, model)


class _Group:
    """Layers that read the same input. The first that is called with it computes the results of all, which the others
    return; one that is called with another tensor has them computed anew."""

    def __init__(self, layers: Sequence[nn.Linear], active: Active):
        self.layers, self.active = layers, active
        self.hidden: Tensor | None = None
        self.results: dict[nn.Linear, Tensor] = {}
        """Of the layers that have not been called with `hidden` yet."""
        for layer in layers:
            layer.forward = partial(self._forward, layer)  # pyright: ignore[reportAttributeAccessIssue]  # hidden: its name there

    def _forward(self, layer: nn.Linear, hidden: Tensor) -> Tensor:
        a, b = names_of(self.active.name)
        adapted = [each for each in self.layers if a in each._parameters]
        if layer not in adapted:  # the model alone, or an adapter with other targets
            return linear(hidden, layer.weight, layer.bias)
        if hidden is not self.hidden or layer not in self.results:
            weights = [(each.weight, each.bias, getattr(each, a), getattr(each, b)) for each in adapted]
            results = _Adapted.apply(hidden, self.active.scale, *[tensor for each in weights for tensor in each])
            self.hidden, self.results = hidden, dict(zip(adapted, results, strict=True))
        result = self.results.pop(layer)
        if not self.results:
            self.hidden = None
        return result


class _Adapted(torch.autograd.Function):
    """Frozen linear layers with an adapter, and one input: `weights` are W [out, in], bias, A [rank, in] and B
    [out, rank] of each.

    A result, or a gradient of `hidden`, starts as the adapter's part, to which the layer's own product is added in its
    accumulator. In the other order, the adapter's product reads and writes the whole result once more, which takes
    longer than to compute it.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: float, *weights: Tensor) -> tuple[Tensor, ...]:
        w, biases, a, b = (weights[part::4] for part in range(4))
        flat, joined, low, b = shrink(hidden, w[0].dtype, a, b, scale)
        results = []
        for weight, bias, own, part in zip(w, biases, b, low.chunk(len(b), 1), strict=True):
            result = flat.new_empty(*hidden.shape[:-1], len(weight))  # no view: some models change it in place
            fill_product(result, flat, weight, bias, part, own)
            results.append(result)
        ctx.save_for_backward(flat, low, joined, *w, *b)
        ctx.scale, ctx.shape = scale, hidden.shape
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, low, joined, *weights = ctx.saved_tensors
        w, b = weights[: len(grads)], weights[len(grads) :]
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        of_low, of_a, of_b = differentiate_adapters(rows, flat, low, b, ctx.scale)
        of_hidden = None
        if ctx.needs_input_grad[0]:
            of_hidden = differentiate_input(rows, w, of_low, joined).view(ctx.shape)
        return of_hidden, None, *[each for pair in zip(of_a, of_b, strict=True) for each in (None, None, *pair)]


def shrink(
    hidden: Tensor, dtype: torch.dtype, a: Sequence[Tensor], b: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return, in `dtype`: `hidden` [tokens, in]; the A of layers that read it, [layers * rank, in]; the product of
    both, times the scale; and the layers' B.

    The norms of some models return fp32 under autocast, which casts for no product in place. Autograd casts the
    gradients of fp32 matrices back."""
    flat, joined = hidden.reshape(-1, hidden.shape[-1]).to(dtype), torch.cat([*a]).to(dtype)
    return flat, joined, (flat @ joined.T).mul_(scale), [each.to(dtype) for each in b]


def fill_product(result: Tensor, flat: Tensor, w: Tensor, bias: Tensor | None, low: Tensor, b: Tensor) -> None:
    """Fill the contiguous `result` [..., out] with flat W^T + bias + low B^T."""
    rows = result.view(-1, len(w))
    _ = torch.mm(low, b.T, out=rows) if bias is None else torch.addmm(bias, low, b.T, out=rows)
    rows.addmm_(flat, w.T)


def differentiate_adapters(
    grads: Sequence[Tensor], flat: Tensor, low: Tensor, b: Sequence[Tensor], scale: float
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Return the gradients of flat A^T for all layers that read `flat`, [tokens, layers * rank], of each A and of each
    B. `grads`: of the layers' outputs, [tokens, out] each. The others: as `shrink` returns them."""
    of_low = torch.cat([grad @ own for grad, own in zip(grads, b, strict=True)], 1).mul_(scale)
    parts = low.chunk(len(b), 1)
    return of_low, (of_low.T @ flat).chunk(len(b)), [grad.T @ part for grad, part in zip(grads, parts, strict=True)]


def differentiate_input(grads: Sequence[Tensor], w: Sequence[Tensor], of_low: Tensor, joined: Tensor) -> Tensor:
    """Return the gradient [tokens, in] of what layers read, for those of their outputs, [tokens, out] each."""
    of_flat = of_low @ joined
    for grad, weight in zip(grads, w, strict=True):
        of_flat.addmm_(grad, weight)
    return of_flat
