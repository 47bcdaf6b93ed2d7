"""Adapters of several places as two dense products: each token gets its own adapter's, and no other."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from recipe.dag.policy import dense_adapters
from recipe.dag.policy.dense_adapters import Products

RANK, IN, ENDS = 4, 6, (0, 5, 8, 9)
PARTS, OUT = len(ENDS) - 1, ENDS[-1]


class Pool:
    """SGLang's buffers of one layer of three parts, and adapters in them, drawn at random."""

    def __init__(self, places: int):
        self.draw = torch.Generator().manual_seed(0)
        self.a = torch.zeros(places, PARTS * RANK, IN)
        self.b = torch.zeros(places, OUT, RANK)
        self.adapters: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def load(self, place: int, rank: int) -> None:
        """As SGLang: what an adapter of a larger rank left behind stays."""
        pairs = []
        for start, end in zip(ENDS, ENDS[1:], strict=False):
            pairs.append(
                (torch.randn(rank, IN, generator=self.draw), torch.randn(end - start, rank, generator=self.draw))
            )
        if rank:
            self.a[place, : PARTS * rank] = torch.cat([a for a, _ in pairs])
            self.b[place, :, :rank] = torch.cat([b for _, b in pairs])
        self.adapters[place] = pairs

    def expected(self, x: torch.Tensor, owners: list[int], scalings: list[float]) -> torch.Tensor:
        rows = []
        for row, place in zip(x, owners, strict=True):
            rows.append(torch.cat([scalings[place] * (b @ (a @ row)) for a, b in self.adapters[place]]))
        return torch.stack(rows)


@pytest.mark.parametrize(
    ("owners", "lengths"),
    [([1, 1, 1], None), ([0, 1, 2, 2, 0, 3], None), ([2, 0], [3, 1]), ([3, 3], None)],
    ids=["one", "mixed", "prompts", "base"],
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_each_token_gets_its_own_adapter(owners, lengths, in_graph):
    pool, products = Pool(4), Products(4, "cpu")
    products.captured = torch.zeros(8, 4)
    for place, rank in ((0, 4), (1, 2), (2, 3), (3, 0)):
        pool.load(place, rank)
        products.load(place, rank)
    scalings = [0.5, 2.0, 1.0, 0.0]
    products.prepare(owners, lengths, scalings, in_graph=in_graph)
    owners = [place for place, n in zip(owners, lengths or [1] * len(owners), strict=True) for _ in range(n)]
    x, base = torch.randn(len(owners), IN), torch.randn(len(owners), OUT)
    output = products.expand(products.shrink(x, pool.a), pool.b, ENDS, base.clone())
    torch.testing.assert_close(output, base + pool.expected(x, owners, scalings))


def test_an_adapter_that_replaces_a_larger_one_gets_nothing_of_it():
    pool, products = Pool(2), Products(2, "cpu")
    owners, scalings = [0, 1, 0], [1.0, 1.0]
    for place, rank in ((0, 4), (1, 4), (0, 1), (1, 0)):
        pool.load(place, rank)
        products.load(place, rank)
        if pool.adapters.keys() == {0, 1}:
            products.prepare(owners, None, scalings, in_graph=False)
            x = torch.randn(3, IN)
            output = products.expand(products.shrink(x, pool.a), pool.b, ENDS, torch.zeros(3, OUT))
            torch.testing.assert_close(output, pool.expected(x, owners, scalings))


def test_sglangs_pool_and_layers_reach_the_products(monkeypatch):
    registry, pools = {}, ModuleType("sglang.srt.lora.mem_pool")

    class Backend:
        def __init__(self, places, device):
            self.device = device

    class LoRAMemoryPool:
        def load_lora_weight_to_buffer(self, uid, buffer_id, lora_adapter):
            pool.load(buffer_id, 0 if uid is None else lora_adapter.config.r)

    registries = ModuleType("sglang.srt.lora.backend.lora_registry")
    vars(registries)["register_lora_backend"] = lambda name: lambda make: registry.update({name: make})
    bases = ModuleType("sglang.srt.lora.backend.base_backend")
    vars(bases)["BaseLoRABackend"], vars(pools)["LoRAMemoryPool"] = Backend, LoRAMemoryPool
    names = ("sglang", "sglang.srt", "sglang.srt.lora", "sglang.srt.lora.backend")
    for module in (*map(ModuleType, names), registries, bases, pools):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    dense_adapters.register()

    pool = Pool(2)
    backend = registry["dense"]()(max_loras_per_batch=2, device=torch.device("cpu"), server_args=None)
    LoRAMemoryPool().load_lora_weight_to_buffer("a@1", 0, SimpleNamespace(config=SimpleNamespace(r=2)))
    LoRAMemoryPool().load_lora_weight_to_buffer(None, 1, None)
    forward = SimpleNamespace(is_extend=lambda: True, is_target_verify=lambda: False)
    batch = SimpleNamespace(forward_mode=forward, extend_seq_lens_cpu=[2, 1])
    backend.prepare_lora_batch(batch, [0, 1], [2, 0], [3.0, 0.0], use_cuda_graph=False)
    x, ends = torch.randn(3, IN), torch.tensor(ENDS)
    output = backend.run_qkv_lora(
        x,
        pool.a,
        pool.b,
        output_offset=None,
        output_offset_cpu=ends,
        max_qkv_out_dim=5,
        base_output=torch.zeros(3, OUT),
    )
    torch.testing.assert_close(output, pool.expected(x, [0, 0, 1], [3.0, 0.0]))
