"""Several adapters on one frozen model in one FSDP2 engine, with an optimizer and a scheduler each.

Invariant: a pass computes with the model and the adapter in use, or with the model alone; an update changes the adapter
in use and nothing else. Adapters are fp32 and sharded like the model, whose names of weights stay; on one rank, neither
is. An adapter's history does not depend on the other adapters. The adapter of a critic has a value head in place of the
output embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_id
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from recipe.dag.platform.adapter_weights import MappedWeights, Pairs, read_adapter, write_adapter
from recipe.dag.policy import adapter_mlp
from recipe.dag.policy.adapter_config import TrainedAdapter
from recipe.dag.policy.adapter_layers import install, install_heads, names_of
from recipe.dag.policy.engine import PolicyEngine
from recipe.dag.workflow.adapter_shape import HEAD


class AdapterEngine(PolicyEngine):
    """PolicyEngine with adapters; `holding` makes a subclass that has them."""

    adapters: ClassVar[tuple[TrainedAdapter, ...]] = ()

    @classmethod
    def holding(cls, adapters: tuple[TrainedAdapter, ...]) -> type[AdapterEngine]:
        """Return the class of an engine with these adapters."""
        return type(cls.__name__, (cls,), {"adapters": adapters})

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        critics = [adapter.name for adapter in self.adapters if adapter.critic is not None]
        if critics:
            install_heads(module, critics, self.active)
        return module

    def _change_layers(self, module: torch.nn.Module) -> None:
        self.active = install(module, self.adapters, seed=self.engine_config.seed)
        if self.model_config.use_liger:
            adapter_mlp.install(module, self.active)

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        stock: Any = transformer_impl  # whose names these are
        shard, load = stock.apply_fsdp2, stock.fsdp2_load_full_state_dict
        stock.apply_fsdp2, stock.fsdp2_load_full_state_dict = partial(_shard, shard), partial(_load, load)
        try:
            return super()._build_fsdp_module(module)
        finally:
            stock.apply_fsdp2, stock.fsdp2_load_full_state_dict = shard, load

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

    @torch.no_grad()
    def whole(self, name: str) -> Pairs:
        """Return the adapter's weights on the device, which may be those that it trains. A collective: every rank calls
        it."""
        device = self.device_mesh.device_type  # weights may be offloaded, and collectives need them on the device
        pairs = _weights(self.module, name)
        return {layer: (_gathered(a, device), _gathered(b, device)) for layer, (a, b) in pairs.items()}

    @torch.no_grad()
    def whole_head(self, name: str) -> dict[str, Tensor]:
        """Return the weights of a critic's value head, in host memory; {} for an actor. A collective."""
        device = self.device_mesh.device_type
        return {part: _gathered(weight, device).cpu() for part, weight in _head(self.module, name).items()}

    def make_file(self, name: str, folder: Path, dtype: torch.dtype) -> MappedWeights:
        """Make a PEFT folder with an adapter of this one's shape, to be filled."""
        pairs = {
            layer: (torch.empty(a.shape, dtype=dtype), torch.empty(b.shape, dtype=dtype))
            for layer, (a, b) in _weights(self.module, name).items()
        }
        write_adapter(folder, self._adapter(name).shape, pairs, self.model_config.path)
        return MappedWeights(folder, dtype)

    def state_file(self, folder: Path) -> Path:
        """Return this rank's file of an optimizer's and a scheduler's state."""
        world = torch.distributed.get_world_size()
        return folder / f"optim_world_size_{world}_rank_{self.rank}.pt"

    def save(self, name: str, folder: Path) -> None:
        """Save the adapter and the state of its training. A collective."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {"optimizer": self.optimizers[name].state_dict(), "scheduler": self.schedulers[name].state_dict()}
        torch.save(state, self.state_file(folder))
        pairs, head = self.whole(name), self.whole_head(name)
        if self.rank == 0:
            write_adapter(folder, self._adapter(name).shape, pairs, self.model_config.path)
            if head:
                save_file(head, folder / HEAD)

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
        _shard_moments(self.optimizers[name])
        self.schedulers[name].load_state_dict(state["scheduler"])


def _shard(apply_fsdp2: Any, module: nn.Module, options: dict[str, Any], config: Any) -> None:
    """Shard the module as verl does. On one rank, FSDP shards nothing, and would copy the base and all adapters for
    each pass: it leaves them alone unless it has to cast the base, or to fetch it from host memory."""
    dtype, frozen = options["mp_policy"].param_dtype, (each for each in module.parameters() if not each.requires_grad)
    if (
        options["mesh"].size() == 1
        and options["offload_policy"] is None
        and all(each.dtype == dtype for each in frozen)
    ):
        options = options | {"ignored_params": set(module.parameters())}
    apply_fsdp2(module, options, config)


def _load(load: Any, module: nn.Module, *rest: Any) -> None:
    """Load the weights into the shards as verl does. Those that FSDP leaves alone only move to the device: loaded, all
    of them would be there twice at the end."""
    if any(isinstance(each, DTensor) for each in module.parameters()):
        load(module, *rest)
    else:
        module.to(get_device_id())


def _shard_moments(optimizer: torch.optim.Optimizer) -> None:
    """Shard the moments of one rank's file as their weights are: the engine that wrote it may have had FSDP shard them
    (`_shard`), where this one does not, or the other way round."""
    for weight, moments in optimizer.state.items():
        for key, value in moments.items():
            if isinstance(value, DTensor) and not isinstance(weight, DTensor):
                moments[key] = value.to_local()
            elif isinstance(weight, DTensor) and not isinstance(value, DTensor) and value.dim():  # not Adam's counter
                moments[key] = distribute_tensor(value, weight.device_mesh, weight.placements)


def _weights(module: nn.Module, name: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Return A and B of an adapter by the names of their layers."""
    layers = {layer: [child._parameters.get(key) for key in names_of(name)] for layer, child in module.named_modules()}
    return {layer: (a, b) for layer, (a, b) in layers.items() if a is not None and b is not None}


def _head(module: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the weight and the bias of a critic's value head; {} for an actor."""
    parts = {part: module._parameters.get(f"value_{part}_{name}") for part in ("weight", "bias")}
    return {part: weight for part, weight in parts.items() if weight is not None}


def _gathered(weight: Tensor, device: str) -> Tensor:
    if isinstance(weight, DTensor) and weight.device_mesh.size() == 1:
        weight = weight.to_local()  # first: a DTensor's operations cost ten times those of a tensor
    weight = weight.detach().to(device)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _fill(weight: nn.Parameter, saved: Tensor) -> None:
    if isinstance(weight, DTensor):
        saved = distribute_tensor(saved, weight.device_mesh, weight.placements).to_local()
        weight.to_local().copy_(saved)
    else:
        weight.copy_(saved)
