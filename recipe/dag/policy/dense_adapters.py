"""SGLang's matrix products of adapters, as two dense products over the adapters of all places of its pool.

Invariant: a token's output gets the product of its own adapter's matrices alone, times its scaling; a token of the base
gets none.

SGLang 0.5.12's own kernels loop over a layer's inputs within one block of threads, for each segment of a few tokens.
Two products of cuBLAS over all places of the pool, between which the other adapters' columns are set to zero, compute
(places x rank) columns where (rank) were enough, but these are few beside the layer's own.

SGLang is imported by the functions that need it: `register` is called in the process of SGLang's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

NAME = "dense"


class Places:
    """The matrices B of one layer, [places * parts * rank, out]: the rows of a place are its adapter's.

    A layer of several parts (q, k and v) has a pair of matrices for each. SGLang's A is [places, parts * rank, in]; an
    adapter of a smaller rank has its parts at the beginning, one after the other.
    """

    def __init__(self, b: torch.Tensor, ends: Sequence[int], width: int):
        """`b`: SGLang's buffer [places, out, rank]. `ends`: 0 and the parts' ends in `out`. `width`: parts * rank."""
        self.b, self.parts = b, list(pairwise(map(int, ends)))
        self.rows = b.new_zeros(b.shape[0], width, b.shape[1])

    def load(self, place: int, rank: int) -> None:
        """Take over an adapter that is in the pool; `rank` 0: the base."""
        self.rows[place].zero_()
        for number, (start, end) in enumerate(self.parts):
            self.rows[place, number * rank : (number + 1) * rank, start:end] = self.b[place, start:end, :rank].T


class Products:
    """The products of one batch after another."""

    def __init__(self, places: int, device: torch.device | str):
        self.places, self.device = places, torch.device(device)
        self.ranks = dict.fromkeys(range(places), 0)
        self.layers: dict[int, Places] = {}
        """Address of SGLang's B -> its rows here."""
        self.scales = torch.zeros(0, places, device=self.device)
        """[tokens, places]: the scaling of a token's adapter at its place, else 0."""
        self.captured: torch.Tensor | None = None
        """The same for CUDA graphs, which read it at one address."""
        self.alone: tuple[int, float] | None = None
        """The place and the scaling of the only adapter of the batch."""

    def load(self, place: int, rank: int) -> None:
        self.ranks[place] = rank
        for layer in self.layers.values():
            layer.load(place, rank)

    def prepare(
        self, owners: Sequence[int], lengths: Sequence[int] | None, scalings: Sequence[float], *, in_graph: bool
    ) -> None:
        """`owners` [requests]: the place of each request's adapter. `lengths`: its tokens, by default 1. `scalings`
        [places]."""
        self.alone = None if in_graph or len(set(owners)) != 1 else (owners[0], scalings[owners[0]])
        if self.alone is not None:
            return
        index = torch.tensor(owners, dtype=torch.long)
        if lengths is not None:
            index = index.repeat_interleave(torch.tensor(lengths))
        scales = torch.zeros(len(index), self.places, pin_memory=self.device.type == "cuda")
        scales[torch.arange(len(index)), index] = torch.tensor(scalings, dtype=torch.float)[index]
        if in_graph:
            assert self.captured is not None
            self.captured[: len(index)].copy_(scales, non_blocking=True)
            self.scales = self.captured
        else:
            self.scales = scales.to(self.device, non_blocking=True)

    def shrink(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Return [tokens, places * parts * rank], or of the only place, for `x` [tokens, in]."""
        if self.alone is not None:
            place, scaling = self.alone
            return (x @ a[place].T).mul_(scaling)
        h = x @ a.flatten(0, 1).T
        h.view(len(x), self.places, -1).mul_(self.scales[: len(x), :, None])
        return h

    def expand(self, h: torch.Tensor, b: torch.Tensor, ends: Sequence[int], output: torch.Tensor) -> torch.Tensor:
        """Add the adapters' part to `output` [tokens, out], in place."""
        layer = self.layers.get(b.data_ptr())
        if layer is None:
            width = h.shape[1] if self.alone is not None else h.shape[1] // self.places
            layer = self.layers[b.data_ptr()] = Places(b, ends, width)
            for place, rank in self.ranks.items():
                layer.load(place, rank)
        rows = layer.rows.flatten(0, 1) if self.alone is None else layer.rows[self.alone[0]]
        return output.addmm_(h, rows)


def register() -> None:
    """Give SGLang the back end."""
    from sglang.srt.lora.backend.lora_registry import register_lora_backend
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

    backends: list[Any] = []
    backend = _backend(backends)
    register_lora_backend(NAME)(lambda: backend)
    load = LoRAMemoryPool.load_lora_weight_to_buffer

    def load_and_follow(self: Any, uid: Any, buffer_id: int, lora_adapter: Any, *rest: Any, **named: Any) -> None:
        load(self, uid, buffer_id, lora_adapter, *rest, **named)
        for each in backends:
            each.products.load(buffer_id, 0 if uid is None else lora_adapter.config.r)

    LoRAMemoryPool.load_lora_weight_to_buffer = load_and_follow


def _backend(made: list[Any]) -> type:
    """Return SGLang's form of a back end, whose objects are added to `made`."""
    from sglang.srt.lora.backend.base_backend import BaseLoRABackend

    class Dense(BaseLoRABackend):
        name = NAME

        def __init__(self, max_loras_per_batch: int, device: torch.device, **_: Any):
            super().__init__(max_loras_per_batch, device)
            self.products = Products(max_loras_per_batch, device)
            made.append(self)

        def init_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_bs: int) -> None:
            rows = max_bs_in_cuda_graph * num_tokens_per_bs
            self.products.captured = torch.zeros(rows, self.products.places, device=self.device)

        def init_cuda_graph_moe_buffers(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError("adapters of experts: set rollout.engine_kwargs.sglang.lora_backend=csgmv")

        def prepare_lora_batch(
            self,
            forward_batch: Any,
            weight_indices: list[int],
            lora_ranks: Any,
            scalings: list[float],
            use_cuda_graph: bool,
        ) -> None:
            mode = forward_batch.forward_mode
            lengths = forward_batch.extend_seq_lens_cpu if mode.is_extend() else None
            if mode.is_target_verify():  # of drafts
                lengths = [forward_batch.spec_info.draft_token_num] * len(weight_indices)
            self.products.prepare(weight_indices, lengths, scalings, in_graph=use_cuda_graph)
            self.batch_info = SimpleNamespace(use_cuda_graph=use_cuda_graph)
            self.lm_head_batch_info = self.lm_head_pass_batch_infos = None

        def run_lora_a_sgemm(self, x: Any, weights: Any, *_: Any, **__: Any) -> Any:
            return self.products.shrink(x, weights)

        def run_lora_b_sgemm(
            self, x: Any, weights: Any, *_: Any, output_offset_cpu: Any, base_output: Any, **__: Any
        ) -> Any:
            return self.products.expand(x, weights, output_offset_cpu, base_output)

        def run_qkv_lora(self, x: Any, qkv_lora_a: Any, qkv_lora_b: Any, **rest: Any) -> Any:
            return self.run_lora_b_sgemm(self.products.shrink(x, qkv_lora_a), qkv_lora_b, **rest)

        def run_gate_up_lora(self, x: Any, gate_up_lora_a: Any, gate_up_lora_b: Any, **rest: Any) -> Any:
            return self.run_lora_b_sgemm(self.products.shrink(x, gate_up_lora_a), gate_up_lora_b, **rest)

    return Dense
