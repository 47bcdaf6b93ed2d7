"""Adapters of several ranks as two dense products: each token gets its own adapter's, and no other."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from recipe.dag.policy import dense_adapters
from recipe.dag.policy.dense_adapters import Adapter, Columns, Products

RANK, IN, ENDS = 4, 6, (0, 5, 8, 9)
PARTS, OUT = len(ENDS) - 1, ENDS[-1]


class Pool:
    """SGLang's buffers of one layer of three parts, and adapters in them, drawn at random."""

    max_loras_per_batch, max_lora_rank, target_modules = 4, RANK, {"qkv_proj"}

    def __init__(self):
        self.draw = torch.Generator().manual_seed(0)
        self.a = torch.zeros(self.max_loras_per_batch, PARTS * RANK, IN)
        self.b = torch.zeros(self.max_loras_per_batch, OUT, RANK)
        self.adapters: dict[str, Adapter] = {}
        self.pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def load(self, name: str, place: int, rank: int, scaling: float) -> None:
        """As SGLang: what an adapter of a larger rank left behind stays."""
        pairs = []
        for start, end in zip(ENDS, ENDS[1:], strict=False):
            pairs.append(
                (torch.randn(rank, IN, generator=self.draw), torch.randn(end - start, rank, generator=self.draw))
            )
        self.a[place, : PARTS * rank] = torch.cat([a for a, _ in pairs])
        self.b[place, :, :rank] = torch.cat([b for _, b in pairs])
        self.pairs[name], self.adapters[name] = pairs, Adapter(place, rank, scaling)

    def of(self, requests: list[str | None]) -> dict[str, Adapter]:
        return {name: self.adapters[name] for name in requests if name is not None}

    def get_tensor(self, target_module: str, layer_id: int, lora_type: str) -> torch.Tensor:
        return {"A": self.a, "B": self.b}[lora_type]

    def expected(self, x: torch.Tensor, owners: list[str | None]) -> torch.Tensor:
        rows = []
        for row, name in zip(x, owners, strict=True):
            pairs = [] if name is None else self.pairs[name]
            rows.append(
                torch.cat([self.adapters[name].scaling * (b @ (a @ row)) for a, b in pairs] or [row.new_zeros(OUT)])
            )
        return torch.stack(rows)


@pytest.fixture
def pool():
    pool = Pool()
    for name, place, rank, scaling in (("a@1", 0, 4, 0.5), ("b@1", 1, 2, 2.0), ("c@1", 3, 3, 1.0)):
        pool.load(name, place, rank, scaling)
    return pool


def products_of(pool: Pool, columns: int) -> Products:
    products = Products(columns, "cpu")
    products.add(pool.a, pool.b, ENDS)
    products.capture(8)
    return products


def check(pool, products, requests, lengths=None, *, in_graph: bool, padding: int = 0) -> None:
    """`padding`: rows of the graph without a request, whose output is not read."""
    products.prepare(requests, lengths, pool.of(requests), in_graph=in_graph)
    owners = [name for name, n in zip(requests, lengths or [1] * len(requests), strict=True) for _ in range(n)]
    x, base = torch.randn(len(owners) + padding, IN), torch.randn(len(owners) + padding, OUT)
    output = products.expand(products.shrink(x, pool.a), pool.b, base.clone())
    true = base[: len(owners)] + pool.expected(x[: len(owners)], owners)
    torch.testing.assert_close(output[: len(owners)], true)


@pytest.mark.parametrize(
    ("requests_", "lengths"),
    [
        (["b@1", "b@1", "b@1"], None),
        (["a@1", "b@1", "c@1", "c@1", "a@1", None], None),
        (["c@1", "a@1"], [3, 1]),
        ([None, None], None),
    ],
    ids=["one", "mixed", "prompts", "base"],
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_each_token_gets_its_own_adapter(pool, requests_, lengths, in_graph):
    products = products_of(pool, columns=9)
    check(pool, products, requests_, lengths, in_graph=in_graph, padding=2 if in_graph else 0)
    assert (products.one_by_one is None) == (in_graph or len(set(requests_)) > 1), "else it needs no other's columns"


def test_a_graph_reads_the_adapters_of_each_batch_at_one_address(pool):
    products = products_of(pool, columns=8)
    layer = products.layers[pool.a.data_ptr()]
    fixed = (layer.rows_a, layer.rows_b, products.owners)
    read = [each.data_ptr() for each in (*fixed, products.captured)]
    for version in range(1, 5):  # which replace each other, in the pool and in the columns
        check(pool, products, [f"a@{version}", None, "b@1"], in_graph=True)
        assert products.columns.held.keys() == {f"a@{version}", "b@1"}
        assert [each.data_ptr() for each in (*fixed, products.owner)] == read
        pool.load(f"a@{version + 1}", 2 if version % 2 else 0, 4 - version % 2, 1.0 + version)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_batch_that_needs_more_columns_is_computed_one_adapter_after_the_other(pool, in_graph):
    pool.load("d@1", 2, 4, 3.0)
    products = products_of(pool, columns=8)
    check(pool, products, ["a@1", "d@1"], in_graph=in_graph)
    assert products.one_by_one is None
    check(pool, products, ["a@1", None, "b@1", "a@1", "d@1", "d@1"], in_graph=in_graph)
    assert len(products.one_by_one) == 3
    check(pool, products, ["b@1", "d@1"], in_graph=in_graph)
    assert products.one_by_one is None


def test_columns_are_those_of_adapters_that_were_not_used_for_longest():
    columns = Columns(8)
    assert columns.take({"a": 4, "b": 2}) == ["a", "b"]
    assert columns.take({"a": 4}) == []
    assert columns.take({"c": 3}) == ["c"] and columns.held.keys() == {"a", "c"}
    assert columns.take({"a": 4, "b": 2, "c": 3}) is None and columns.held.keys() == {"a", "c"}
    assert columns.take({"d": 8}) == ["d"] and columns.held == {"d": columns.held["d"]}
    assert sorted(columns.held["d"]) == [*range(8)] and not columns.free


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's names that the back end uses, with the pool's layer in a model of one layer."""
    names = ("lora", "lora.backend", "model_executor")
    modules = {name: ModuleType(f"sglang.srt.{name}") for name in names}
    registry = {}

    class Backend:
        def __init__(self, places, device):
            self.device = device

    class LoRAManager:
        def __init__(self, pool, backend, module):
            self.memory_pool, self.lora_backend, self.device = pool, backend, torch.device("cpu")
            self.lora_modules = [{"layers.0.qkv_proj": module}]

        def update_lora_info(self): ...

    class CudaGraphRunner:
        def __init__(self, manager):
            self.model_runner = SimpleNamespace(lora_manager=manager)

        def can_run(self, forward_batch):
            return True

    given = {
        "lora.backend.lora_registry": {"register_lora_backend": lambda name: partial(registry.__setitem__, name)},
        "lora.backend.base_backend": {"BaseLoRABackend": Backend},
        "lora.lora_manager": {"LoRAManager": LoRAManager},
        "lora.utils": {
            "LoRAType": SimpleNamespace(LORA_A="A", LORA_B="B"),
            "get_target_module_name": lambda name, targets: next(each for each in targets if each in name),
        },
        "model_executor.cuda_graph_runner": {"CudaGraphRunner": CudaGraphRunner},
    }
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in {**{name: {} for name in modules}, **given}.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(registry=registry, manager=LoRAManager, runner=CudaGraphRunner)


def batch_of(requests, lengths=None):
    mode = SimpleNamespace(is_extend=lambda: lengths is not None, is_target_verify=lambda: False)
    return SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=lengths, lora_ids=requests)


@pytest.mark.parametrize("columns", [8, None])
def test_sglangs_pool_and_layers_reach_the_products(sglang, pool, columns):
    dense_adapters.register(columns)
    backend = sglang.registry["dense"]()(max_loras_per_batch=4, device=torch.device("cpu"), server_args=None)
    ends = torch.tensor(ENDS)
    manager = sglang.manager(pool, backend, SimpleNamespace(output_offset_cpu=ends))
    manager.update_lora_info()
    backend.init_cuda_graph_batch_info(max_bs_in_cuda_graph=8, num_tokens_per_bs=1)
    ranks, scalings = [4, 2, 0, 3], [0.5, 2.0, 0.0, 1.0]
    places = {None: 2, "a@1": 0, "b@1": 1, "c@1": 3}
    for requests, lengths, fits in (
        (["a@1", None], [2, 1], True),
        (["b@1", "a@1", "b@1"], None, True),
        (["a@1", "b@1", "c@1"], None, columns is None),
    ):
        batch = batch_of(requests, lengths)
        indices = [places[name] for name in requests]
        backend.prepare_lora_batch(batch, indices, ranks, scalings, use_cuda_graph=lengths is None)
        owners = [name for name, n in zip(requests, lengths or [1, 1, 1], strict=True) for _ in range(n)]
        x = torch.randn(3, IN)
        rest = {"output_offset": None, "output_offset_cpu": ends, "max_qkv_out_dim": 5}
        output = backend.run_qkv_lora(x, pool.a, pool.b, **rest, base_output=torch.zeros(3, OUT))
        torch.testing.assert_close(output, pool.expected(x, owners))
        assert sglang.runner(manager).can_run(batch) == fits
    of_whole_weights = sglang.runner(None)
    del of_whole_weights.model_runner.lora_manager
    assert of_whole_weights.can_run(SimpleNamespace(lora_ids=[None]))


def test_experts_are_refused(sglang, pool):
    dense_adapters.register()
    backend = sglang.registry["dense"]()(max_loras_per_batch=4, device=torch.device("cpu"), server_args=None)
    with pytest.raises(NotImplementedError, match="lora_backend=csgmv"):
        sglang.manager(pool, backend, SimpleNamespace()).update_lora_info()
    other = SimpleNamespace()
    sglang.manager(pool, other, SimpleNamespace()).update_lora_info()  # of another back end
