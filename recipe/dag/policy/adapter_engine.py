"""Several adapters on one frozen model in one FSDP2 engine, with an optimizer and a scheduler each.

Invariant: a pass computes with the model and the adapter in use, or with the model alone; an update changes the adapter
in use and nothing else. Adapters are fp32 and sharded like the model, whose names of weights stay. An adapter's history
does not depend on the other adapters. The adapter of a critic has a value head in place of the output embeddings.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import linear
from transformers.modeling_outputs import TokenClassifierOutput
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from recipe.dag.platform.adapter_weights import Pairs, read_adapter, target_layers, write_adapter
from recipe.dag.policy.adapter_config import TrainedAdapter
from recipe.dag.policy.engine import PolicyEngine
from recipe.dag.workflow.adapter_shape import HEAD


class Active:
    """The adapter with which the layers compute; shared by all of them. No module, so that no state dict has it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.scale = 1.0


def install(model: Any, adapters: tuple[TrainedAdapter, ...], *, seed: int) -> Active:
    """Freeze the model, and give the adapters' layers their A and B. Only these instances change."""
    model.requires_grad_(False)
    active = Active()
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
            for part, tensor in (("A", a), ("B", b)):
                # on the layer's device, which is `meta` on ranks that get their weights from rank 0
                parameter = nn.Parameter(tensor.to(layer.weight.device, torch.float32))
                layer.register_parameter(f"lora_{part}_{adapter.name}", parameter)
            if "lora" not in vars(layer):
                vars(layer)["lora"] = active
                layer.forward = types.MethodType(_forward, layer)
    critics = [adapter.name for adapter in adapters if adapter.critic is not None]
    if critics:
        _install_heads(model, critics, active)
    return active


def _install_heads(model: Any, critics: list[str], active: Active) -> None:
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


def _forward(self: Any, hidden: Tensor) -> Tensor:
    a = getattr(self, f"lora_A_{self.lora.name}", None)
    if a is None:  # the model alone, or an adapter with other targets
        return linear(hidden, self.weight, self.bias)
    b = getattr(self, f"lora_B_{self.lora.name}")
    return _Adapted.apply(hidden, self.weight, self.bias, a, b, self.lora.scale)


class _Adapted(torch.autograd.Function):
    """A frozen linear layer with an adapter: hidden W^T + bias + scale (hidden A^T) B^T, with W of [out, in], A of
    [rank, in] and B of [out, rank].

    Both additions happen in the accumulator of a matrix product, in place. As separate operations, they write and read
    the output, and in the backward pass the gradient of `hidden`, three times more, which takes longer than the
    products themselves: these have `rank` columns.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float):
        flat = hidden.reshape(-1, hidden.shape[-1])
        low = flat @ a.T
        out = linear(flat, weight, bias).addmm_(low, b.T, alpha=scale)
        ctx.save_for_backward(flat, low, weight, a, b)
        ctx.scale = scale
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, low, weight, a, b = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        of_low = (grad @ b).mul_(ctx.scale)
        of_hidden = None
        if ctx.needs_input_grad[0]:
            of_hidden = (grad @ weight).addmm_(of_low, a).view(*grads[0].shape[:-1], -1)
        return of_hidden, None, None, of_low.T @ flat, (grad.T @ low).mul_(ctx.scale), None


class AdapterEngine(PolicyEngine):
    """PolicyEngine with adapters; `holding` makes a subclass that has them."""

    adapters: ClassVar[tuple[TrainedAdapter, ...]] = ()

    @classmethod
    def holding(cls, adapters: tuple[TrainedAdapter, ...]) -> type[AdapterEngine]:
        """Return the class of an engine with these adapters."""
        return type(cls.__name__, (cls,), {"adapters": adapters})

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        self.active = install(module, self.adapters, seed=self.engine_config.seed)
        return module

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedulers: dict[str, Any] = {}
        self.optimizer_configs = {each.name: omega_conf_to_dataclass(each.optim) for each in self.adapters}
        for name, config in self.optimizer_configs.items():
            self.optimizer_config = config  # verl's constructors read that of the engine
            weights = [weight for pair in _weights(module, name).values() for weight in pair]
            weights += _head(module, name).values()
            optimizer = self.optimizers[name] = build_optimizer(weights, config)
            self.schedulers[name] = super()._build_lr_scheduler(optimizer)
        return self.optimizers[self.adapters[0].name]

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.schedulers[self.adapters[0].name]

    def use(self, name: str | None) -> None:
        """Compute with this adapter, and update it; None: compute with the model alone. Raises KeyError."""
        if name is None:
            self.active.name = None
            return
        self.optimizer, self.lr_scheduler = self.optimizers[name], self.schedulers[name]
        self.optimizer_config = self.optimizer_configs[name]
        self.active.name, self.active.scale = name, self._adapter(name).shape.scale

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self._uses_critic:
            inputs.pop("scored", None)
        return inputs, output_args

    def prepare_model_outputs(self, output, output_args: dict, micro_batch: TensorDict, logits_processor_func) -> dict:
        prepare: Any = super().prepare_model_outputs
        if self._uses_critic:  # verl's function for values, which needs nothing of its class
            prepare = partial(FSDPEngineWithValueHead.prepare_model_outputs, self)  # pyright: ignore[reportAttributeAccessIssue]  # hidden by verl's decorator
        return prepare(output, output_args, micro_batch, logits_processor_func)

    @property
    def _uses_critic(self) -> bool:
        return self.active.name is not None and self._adapter(self.active.name).critic is not None

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Compute with the model alone, as the reference of its adapters."""
        name, self.active.name = self.active.name, None
        try:
            yield
        finally:
            self.active.name = name

    def _adapter(self, name: str) -> TrainedAdapter:
        return next(adapter for adapter in self.adapters if adapter.name == name)

    def whole(self, name: str, dtype: torch.dtype = torch.float32) -> Pairs:
        """Return the adapter's weights, in host memory. A collective: every rank calls it."""
        pairs = _weights(self.module, name)
        tensors = iter(self._whole([weight for pair in pairs.values() for weight in pair], dtype))
        return {layer: (next(tensors), next(tensors)) for layer in pairs}

    def whole_head(self, name: str) -> dict[str, Tensor]:
        """Return the weights of a critic's value head, in host memory; {} for an actor. A collective."""
        head = _head(self.module, name)
        return dict(zip(head, self._whole(list(head.values()), torch.float32), strict=True)) if head else {}

    @torch.no_grad()
    def _whole(self, weights: Sequence[nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
        device = self.device_mesh.device_type  # weights may be offloaded, and collectives need them on the device
        gathered = [_gathered(weight.detach().to(device)).to(dtype) for weight in weights]
        # one copy to the host: 500 copies, one after the other, take longer than their bytes
        parts = torch.cat([tensor.flatten() for tensor in gathered]).cpu().split([each.numel() for each in gathered])
        return [part.view(each.shape).clone() for part, each in zip(parts, gathered, strict=True)]

    def write(self, name: str, folder: Path, *, leads: bool, dtype: torch.dtype = torch.float32) -> None:
        """Write the adapter as a PEFT folder, in the processes that lead. A collective."""
        pairs, head = self.whole(name, dtype), self.whole_head(name)
        if leads:
            write_adapter(folder, self._adapter(name).shape, pairs, self.model_config.path)
            if head:
                save_file(head, folder / HEAD)

    def state_file(self, folder: Path) -> Path:
        """Return this rank's file of an optimizer's and a scheduler's state."""
        world = torch.distributed.get_world_size()
        return folder / f"optim_world_size_{world}_rank_{self.rank}.pt"

    def save(self, name: str, folder: Path) -> None:
        """Save the adapter and the state of its training. A collective."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {"optimizer": self.optimizers[name].state_dict(), "scheduler": self.schedulers[name].state_dict()}
        torch.save(state, self.state_file(folder))
        self.write(name, folder, leads=self.rank == 0)

    @torch.no_grad()
    def load(self, name: str, folder: Path) -> None:
        """Load what `save` wrote. A collective. Raises UserError."""
        adapter, weights = self._adapter(name), _weights(self.module, name)
        layers = {layer: module for layer, module in self.module.named_modules() if layer in weights}
        shape, pairs = read_adapter(folder, layers)  # pyright: ignore[reportArgumentType]  # those with A and B
        assert shape.rank == adapter.shape.rank and pairs.keys() == weights.keys(), folder
        for layer, pair in weights.items():
            for weight, saved in zip(pair, pairs[layer], strict=True):
                _fill(weight, saved.to(self.device_mesh.device_type, weight.dtype))
        if head := _head(self.module, name):
            saved_head = load_file(folder / HEAD)
            for part, weight in head.items():
                _fill(weight, saved_head[part].to(self.device_mesh.device_type))
        state = torch.load(self.state_file(folder), weights_only=True)
        self.optimizers[name].load_state_dict(state["optimizer"])
        self.schedulers[name].load_state_dict(state["scheduler"])


def _weights(module: nn.Module, name: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Return A and B of an adapter by the names of their layers."""
    keys = f"lora_A_{name}", f"lora_B_{name}"
    layers = {layer: [child._parameters.get(key) for key in keys] for layer, child in module.named_modules()}
    return {layer: (a, b) for layer, (a, b) in layers.items() if a is not None and b is not None}


def _head(module: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the weight and the bias of a critic's value head; {} for an actor."""
    parts = {part: module._parameters.get(f"value_{part}_{name}") for part in ("weight", "bias")}
    return {part: weight for part, weight in parts.items() if weight is not None}


def _gathered(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def _fill(weight: nn.Parameter, saved: Tensor) -> None:
    if isinstance(weight, DTensor):
        saved = distribute_tensor(saved, weight.device_mesh, weight.placements).to_local()
        weight.to_local().copy_(saved)
    else:
        weight.copy_(saved)
