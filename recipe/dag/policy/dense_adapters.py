"""SGLang's matrix products of adapters, as two dense products over the columns of all adapters of a batch.

Invariant: a token's output gets the product of its own adapter's matrices alone, times its scaling; a token of the base
gets none.

SGLang 0.5.12's own kernels loop over a layer's inputs within one block of threads, for each segment of a few tokens.
Dense products compute as many columns as the ranks of all adapters have together where those of one were enough, but
these are few beside the layer's own. cuBLAS multiplies by A, and one kernel (`adapter_kernel`) by B, without the other
adapters' columns. A layer's own matrix has A as more rows, with which CUDA graphs, those of decoding, multiply at once:
such a batch waits for memory to be read, so that the rows cost nothing. Prompts take two products, since the sum needs
memory of its own beside a product of both.

SGLang's pool pads each adapter to the largest rank. The products read copies without that padding, whose shapes and
addresses CUDA graphs hold. A batch that needs more columns than there are, as with two versions of each adapter, is
computed from the pool, one adapter after the other and without a CUDA graph.

SGLang is imported by the functions that need it: `register` is called in the process of SGLang's scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

NAME = "dense"


class Adapter(NamedTuple):
    place: int
    """In SGLang's pool."""
    rank: int
    scaling: float


class Layer:
    """The matrices of one layer, which has one pair of them for each of its parts (q, k and v)."""

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        ends: Sequence[int],
        columns: int,
        stacked: torch.Tensor | None = None,
    ):
        """`a`: SGLang's buffer [places, parts * largest rank, in]; an adapter of a smaller rank has its parts at the
        beginning, one after the other. `b`: [places, out, largest rank]. `ends`: 0 and the parts' ends in `out`.
        `stacked` [out + parts * columns, in]: the layer's own matrix, and room for A below it."""
        self.a, self.b, self.parts = a, b, list(pairwise(map(int, ends)))
        shape = (len(self.parts), columns, a.shape[2])
        self.rows_a = a.new_zeros(shape) if stacked is None else stacked[b.shape[1] :].view(shape)
        self.rows_b = b.new_zeros(columns, b.shape[1])
        """Times the scaling. An output has the columns of its own part alone."""
        self.h: torch.Tensor | None = None
        """What `Stacked` computed [tokens, parts * columns], until `Products.shrink` returns it."""

    def load(self, adapter: Adapter, columns: torch.Tensor) -> None:
        """Copy an adapter that is in the pool into `columns` [rank]."""
        place, rank, scaling = adapter
        self.rows_a[:, columns] = self.a[place, : len(self.parts) * rank].unflatten(0, (-1, rank))
        self.rows_b[columns] = self.b[place, :, :rank].T * scaling


class Columns:
    """Which adapter has which columns: the same on all ranks of a server, which add up what they computed in them."""

    def __init__(self, number: int):
        self.number, self.free = number, list(range(number))
        self.held: dict[str, list[int]] = {}
        """SGLang's id of an adapter, which names one version -> its columns; the least recently used is the first."""

    def take(self, ranks: Mapping[str, int]) -> list[str] | None:
        """Give the adapters of a batch their columns, if need be those of others. Return those that had none before;
        None, and no change, if the batch needs more than there are."""
        if sum(ranks.values()) > self.number:
            return None
        for name in ranks:
            if name in self.held:
                self.held[name] = self.held.pop(name)
        new = [name for name in ranks if name not in self.held]
        for name in new:
            while len(self.free) < ranks[name]:
                self.free += self.held.pop(next(iter(self.held)))
            self.held[name], self.free = self.free[: ranks[name]], self.free[ranks[name] :]
        return new


class Products:
    """The products of one batch after another."""

    def __init__(self, columns: int, device: torch.device | str):
        """`columns`: the ranks of the adapters that a batch usually has, together, as `padded` returns them."""
        self.columns, self.device = Columns(columns), torch.device(device)
        self.layers: dict[int, Layer] = {}
        """Address of SGLang's A, and of its B -> the layer."""
        self.owners = torch.full((self.columns.number,), -1, dtype=torch.int32, device=self.device)
        """[columns]: the first column of the same adapter; -1: nobody's."""
        self.owner = self.captured = self.owners[:0]
        """[tokens]: the first column of the token's adapter; -2: the base's. `captured` is that of CUDA graphs, which
        read it at one address."""
        self.one_by_one: list[tuple[slice | torch.Tensor, Adapter]] | None = None
        """The rows of an adapter's tokens, all of a batch that has no other adapter; None: computed in columns."""
        self.in_graph = False
        """Whether the batch is computed in columns, by a CUDA graph."""

    def add(self, a: torch.Tensor, b: torch.Tensor, ends: Sequence[int], stacked: torch.Tensor | None = None) -> Layer:
        """Add a layer, as `Layer` takes it."""
        layer = Layer(a, b, ends, self.columns.number, stacked)
        self.layers[a.data_ptr()] = self.layers[b.data_ptr()] = layer
        return layer

    def capture(self, tokens: int) -> None:
        """Make room for CUDA graphs of at most so many tokens."""
        self.captured = torch.full((tokens,), -2, dtype=torch.int32, device=self.device)

    def prepare(
        self,
        requests: Sequence[str | None],
        lengths: Sequence[int] | None,
        adapters: Mapping[str, Adapter],
        *,
        in_graph: bool,
    ) -> None:
        """`requests`: the id of each one's adapter; None: the base. `lengths`: its tokens, by default 1. `adapters`:
        those of the batch."""
        self.in_graph = False
        if not in_graph and len(set(requests)) == 1:
            self.one_by_one = [(slice(None), adapter) for adapter in adapters.values()]
            return
        new = self.columns.take({name: adapter.rank for name, adapter in adapters.items()})
        if new is None:
            lengths = [1] * len(requests) if lengths is None else lengths
            owner = [name for name, length in zip(requests, lengths, strict=True) for _ in range(length)]
            rows = {name: [row for row, each in enumerate(owner) if each == name] for name in adapters}
            self.one_by_one = [
                (torch.tensor(rows[name], device=self.device), adapter) for name, adapter in adapters.items()
            ]
            return
        self.one_by_one = None
        if new:
            self._load({name: adapters[name] for name in new})
        first = [-2 if name is None else self.columns.held[name][0] for name in requests]
        owner = torch.tensor(first, dtype=torch.int32)
        if lengths is not None:
            owner = owner.repeat_interleave(torch.tensor(lengths, dtype=torch.long))
        if self.device.type == "cuda":
            owner = owner.pin_memory()
        if in_graph:
            self.in_graph = True
            self.owner = self.captured
            self.owner[: len(owner)].copy_(owner, non_blocking=True)
        else:
            self.owner = owner.to(self.device, non_blocking=True)

    def shrink(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Return the input of `expand`, [tokens, _], for `x` [tokens, in]."""
        layer = self.layers[a.data_ptr()]
        if layer.h is not None:
            h, layer.h = layer.h, None
            return h
        parts = len(layer.parts)
        if self.one_by_one is None:
            return x @ layer.rows_a.flatten(0, 1).T
        h = x.new_empty(len(x), parts * max((adapter.rank for _, adapter in self.one_by_one), default=1))
        for rows, (place, rank, _) in self.one_by_one:
            own = x[rows] @ a[place, : parts * rank].T
            if isinstance(rows, slice):
                return own
            h[rows, : parts * rank] = own
        return h

    def expand(self, h: torch.Tensor, b: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return `output` [tokens, out] with the adapters' part, contiguous; in place, if `output` is."""
        layer = self.layers[b.data_ptr()]
        if self.one_by_one is None:
            return self._expand_columns(h, layer, output)
        for rows, (place, rank, scaling) in self.one_by_one:
            for number, (start, end) in enumerate(layer.parts):
                own = h[rows, number * rank : (number + 1) * rank]
                added = output[rows, start:end].addmm_(own, b[place, start:end, :rank].T, alpha=scaling)
                if not isinstance(rows, slice):  # not a view
                    output[rows, start:end] = added
        return output

    def _expand_columns(self, h: torch.Tensor, layer: Layer, output: torch.Tensor) -> torch.Tensor:
        if output.is_cuda and output.itemsize == 2 and len(layer.parts) <= 3:  # fp32 exceeds the kernel's registers
            from recipe.dag.policy.adapter_kernel import add_product

            return add_product(h, layer.rows_b, output, self.owner, self.owners, [end for _, end in layer.parts])
        output = output.contiguous()
        own = self.owner[: len(h), None] == self.owners
        for columns, (start, end) in zip(h.split(len(self.owners), 1), layer.parts, strict=True):
            output[:, start:end].addmm_(columns.where(own, 0), layer.rows_b[:, start:end])
        return output

    def _load(self, adapters: Mapping[str, Adapter]) -> None:
        """Copy adapters that have been given columns."""
        for name, adapter in adapters.items():
            columns = torch.tensor(self.columns.held[name], device=self.device)
            for layer in {id(layer): layer for layer in self.layers.values()}.values():
                layer.load(adapter, columns)
        owners = torch.full_like(self.owners, -1, device="cpu")
        for columns in self.columns.held.values():
            owners[columns] = columns[0]
        self.owners.copy_(owners)


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


def padded(columns: int) -> int:
    """Return how many columns there are for adapters of so many ranks: rows of 32 bytes, which kernels read at once."""
    return -(-columns // 16) * 16


def register(columns: int | None = None) -> None:
    """Give SGLang the back end. `columns`: the ranks of the adapters that a batch usually has, together; None: room for
    all of SGLang's pool, not in the layers' own matrices."""
    from sglang.srt.lora.backend.lora_registry import register_lora_backend
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

    backend = _backend()
    register_lora_backend(NAME)(lambda: backend)
    update, can_run = LoRAManager.update_lora_info, CudaGraphRunner.can_run

    def update_and_copy(self: Any) -> None:
        update(self)
        if isinstance(self.lora_backend, backend):
            self.lora_backend.products = _products(columns, self)

    def can_run_in_columns(self: Any, forward_batch: Any) -> bool:
        own: Any = getattr(getattr(self.model_runner, "lora_manager", None), "lora_backend", None)
        if isinstance(own, backend) and own.products.one_by_one is not None:
            return False
        return can_run(self, forward_batch)

    LoRAManager.update_lora_info, CudaGraphRunner.can_run = update_and_copy, can_run_in_columns
    if columns:
        _leave_room(padded(columns))


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
        layer.weight.stacked = stacked  # gone with a weight that is replaced, as torchao does

    UnquantizedLinearMethod.create_weights = create_with_room


def _products(columns: int | None, manager: Any) -> Products:
    """Return the products of an SGLang's layers with adapters."""
    from sglang.srt.lora.utils import LoRAType, get_target_module_name

    pool = manager.memory_pool
    products = Products(padded(columns or pool.max_loras_per_batch * pool.max_lora_rank), manager.device)
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
