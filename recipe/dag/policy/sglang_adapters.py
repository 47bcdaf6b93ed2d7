"""SGLang's back end of adapters with this project's products, and its layers' matrices with room for A.

Invariant: a layer's output is SGLang's plus what `dense_adapters` adds, whichever way its own product was computed; of
a layer that an MLP's activation follows, the activation adds it.

SGLang is imported by the functions that need it: `register` is called in the process of SGLang's scheduler.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from recipe.dag.policy.dense_adapters import Adapter, Layer, Products
from recipe.dag.workflow.adapter_shape import columns_of

NAME = "dense"
GATED = ("LlamaMLP", "Qwen2MLP")
"""SGLang's classes whose `forward` gives the output of `gate_up_proj` to `act_fn`, SwiGLU, and to nothing else: those
of most dense models, Qwen3's too."""


class Stacked:
    """SGLang's method of a layer without quantization, which in CUDA graphs multiplies by A, too."""

    def __init__(self, method: Any, stacked: torch.Tensor, bias: torch.Tensor | None, products: Products, layer: Layer):
        """`stacked`: as `Layer` takes it. `bias` [out]."""
        self.method, self.matrix, self.products, self.layer = method, stacked, products, layer
        self.out = layer.b.shape[1]
        self.bias = None if bias is None else nn.functional.pad(bias, (0, len(stacked) - self.out))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def apply(self, module: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self.products.in_graph:
            return self.method.apply(module, x, bias)
        both = nn.functional.linear(x, self.matrix, None if bias is None else self.bias)
        self.layer.h = both[:, self.out :]
        return both[:, : self.out]


class Gated(nn.Module):
    """SGLang's activation of an MLP, with the adapters' part of what it reads."""

    def __init__(self, activation: nn.Module, products: Products, layer: Layer):
        super().__init__()
        self.activation, self.products, self.layer = activation, products, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products.gate(x, self.layer, self.activation)


def register(columns: int | None = None) -> None:
    """Give SGLang the back end. `columns`: those that the adapters of a batch usually have together, each `columns_of`
    its rank; None: room for all of SGLang's pool, not in the layers' own matrices."""
    from sglang.srt.lora.backend.lora_registry import register_lora_backend
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_executor.breakable_cuda_graph_runner import BreakableCudaGraphRunner
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

    backend = _backend()
    register_lora_backend(NAME)(lambda: backend)
    update, warm_up = LoRAManager.update_lora_info, BreakableCudaGraphRunner._warmup

    def update_and_copy(self: Any) -> None:
        update(self)
        if isinstance(self.lora_backend, backend):
            self.lora_backend.products = _products(columns, self)

    def prepare_and_warm_up(self: Any) -> None:  # SGLang captures prompts next, and prepares no adapters for that
        if (products := _products_of(self)) is not None:
            products.capture_prompts(self.max_num_tokens)
        warm_up(self)

    LoRAManager.update_lora_info = update_and_copy
    BreakableCudaGraphRunner._warmup = prepare_and_warm_up
    for runner in (CudaGraphRunner, BreakableCudaGraphRunner):
        runner.can_run = _in_columns(runner.can_run)
    if columns:
        _leave_room(columns)


def allow_graphs(server_args: Any) -> None:
    """Change SGLang's class ServerArgs: servers of adapters may have breakable CUDA graphs of prompts, unless one of
    its other rules excludes them."""
    decide = server_args._handle_piecewise_cuda_graph

    def decide_by_the_others(self: Any) -> None:
        enable_lora = self.enable_lora
        self.enable_lora = enable_lora and not self.enable_breakable_cuda_graph
        decide(self)
        self.enable_lora = enable_lora

    server_args._handle_piecewise_cuda_graph = decide_by_the_others


def _products_of(runner: Any) -> Products | None:
    """Return those of a server whose CUDA graphs `runner` has; None without adapters or with another back end."""
    backend = getattr(getattr(runner.model_runner, "lora_manager", None), "lora_backend", None)
    return getattr(backend, "products", None)


def _in_columns(can_run: Any) -> Any:
    """Return SGLang's `can_run` of CUDA graphs, without the batches that are computed one adapter after the other."""

    def can_run_in_columns(self: Any, forward_batch: Any) -> bool:
        products = _products_of(self)
        return (products is None or products.one_by_one is None) and can_run(self, forward_batch)

    return can_run_in_columns


def _leave_room(columns: int) -> None:
    """Have SGLang allocate matrices with zeros as more rows, which its layers do not see, for A."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    create = UnquantizedLinearMethod.create_weights

    def create_with_room(
        self: Any,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *rest: Any,
        **named: Any,
    ) -> None:
        sizes = [*output_partition_sizes, len(output_partition_sizes) * columns]
        create(self, layer, input_size_per_partition, sizes, *rest, **named)
        stacked = layer.weight.data
        layer.weight.data, room = stacked.split([sum(output_partition_sizes), sizes[-1]])
        room.zero_()
        layer.weight.stacked = stacked  # gone with a weight that is replaced, as by torchao

    UnquantizedLinearMethod.create_weights = create_with_room


def _products(columns: int | None, manager: Any) -> Products:
    """Return the products of an SGLang's layers with adapters."""
    from sglang.srt.lora.utils import LoRAType, get_target_module_name

    pool = manager.memory_pool
    places = pool.max_loras_per_batch  # may all be adapters', and a graph's free rows are the base's
    products = Products(columns or places * columns_of(pool.max_lora_rank), places + 1, manager.device)
    for number, modules in enumerate(manager.lora_modules):
        for name, module in modules.items():
            if not hasattr(module, "output_offset_cpu"):
                raise NotImplementedError(
                    f"adapters of {name}, as of experts: set rollout.engine_kwargs.sglang.lora_backend=csgmv"
                )
            target = get_target_module_name(name, pool.target_modules)
            a, b = (pool.get_tensor(target, number, kind) for kind in (LoRAType.LORA_A, LoRAType.LORA_B))
            stacked = getattr(getattr(module.base_layer, "weight", None), "stacked", None)
            layer = products.add(a, b, module.output_offset_cpu, stacked)
            if stacked is not None and not _is_summed(module.base_layer):
                bias = getattr(module.base_layer, "bias", None)
                module.base_layer.quant_method = Stacked(module.base_layer.quant_method, stacked, bias, products, layer)
            parent, _, last = name.rpartition(".")
            mlp = manager.base_model.get_submodule(parent)
            if last == "gate_up_proj" and type(mlp).__name__ in GATED:
                layer.is_gated, mlp.act_fn = True, Gated(mlp.act_fn, products, layer)
    return products


def _is_summed(layer: Any) -> bool:
    """Return whether ranks add up a layer's outputs, which then must be contiguous."""
    return getattr(layer, "reduce_results", False) and layer.tp_size > 1


def _backend() -> Any:
    """Return SGLang's form of the back end, a class. Its objects get their products when the pool has been made."""
    from sglang.srt.lora.backend.base_backend import BaseLoRABackend

    class Dense(BaseLoRABackend):
        name = NAME
        products: Products

        def __init__(self, max_loras_per_batch: int, device: torch.device, **_: Any):
            super().__init__(max_loras_per_batch, device)

        def init_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_bs: int) -> None:
            self.products.capture(max_bs_in_cuda_graph * num_tokens_per_bs)

        def prepare_lora_batch(
            self,
            forward_batch: Any,
            weight_indices: list[int],
            lora_ranks: list[int],
            scalings: list[float],
            use_cuda_graph: bool,
        ) -> None:
            mode = forward_batch.forward_mode
            lengths = forward_batch.extend_seq_lens_cpu if mode.is_extend() else None
            if mode.is_target_verify():  # of drafts
                lengths = [forward_batch.spec_info.draft_token_num] * len(weight_indices)
            adapters = {
                name: Adapter(place, lora_ranks[place], scalings[place])
                for name, place in zip(forward_batch.lora_ids, weight_indices, strict=True)
                if name is not None
            }
            self.products.prepare(forward_batch.lora_ids, lengths, adapters, in_graph=use_cuda_graph)
            self.batch_info = SimpleNamespace(use_cuda_graph=use_cuda_graph)
            self.lm_head_batch_info = self.lm_head_pass_batch_infos = None

        def run_lora_a_sgemm(self, x: Any, weights: Any, *_: Any, **__: Any) -> Any:
            return self.products.shrink(x, weights)

        def run_lora_b_sgemm(self, x: Any, weights: Any, *_: Any, base_output: Any, **__: Any) -> Any:
            return self.products.expand(x, weights, base_output)

        def run_qkv_lora(self, x: Any, qkv_lora_a: Any, qkv_lora_b: Any, **rest: Any) -> Any:
            return self.run_lora_b_sgemm(self.products.shrink(x, qkv_lora_a), qkv_lora_b, **rest)

        def run_gate_up_lora(self, x: Any, gate_up_lora_a: Any, gate_up_lora_b: Any, **rest: Any) -> Any:
            return self.run_lora_b_sgemm(self.products.shrink(x, gate_up_lora_a), gate_up_lora_b, **rest)

    return Dense
