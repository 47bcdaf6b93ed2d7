"""Adapters of several ranks as two dense products: each token gets its own adapter's, and no other."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from recipe.dag.policy import dense_adapters
from recipe.dag.policy.dense_adapters import Adapter, Columns, Products, Stacked

RANK, IN, ENDS = 8, 6, (0, 5, 8, 9)
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


class Linear:
    """SGLang's layer with a bias, and its method."""

    def __init__(self):
        self.bias = torch.randn(OUT)

    def apply(self, module: Linear, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, module.weight, bias)


def products_of(pool: Pool, columns: int) -> Products:
    products = Products(columns, "cpu")
    pool.linear = Linear()
    stacked = torch.randn(OUT + PARTS * columns, IN)
    pool.linear.weight, room = stacked.split([OUT, PARTS * columns])
    room.zero_()
    layer = products.add(pool.a, pool.b, ENDS, stacked)
    pool.stacked = Stacked(pool.linear, stacked, pool.linear.bias, products, layer)
    products.capture(8)
    return products


def check(pool, products, requests, lengths=None, *, in_graph: bool, padding: int = 0) -> None:
    """`padding`: rows of the graph without a request, whose output is not read."""
    products.prepare(requests, lengths, pool.of(requests), in_graph=in_graph)
    owners = [name for name, n in zip(requests, lengths or [1] * len(requests), strict=True) for _ in range(n)]
    x = torch.randn(len(owners) + padding, IN)
    for method in (pool.linear, pool.stacked):
        for bias in (None, pool.linear.bias):
            base = method.apply(pool.linear, x, bias)
            output = products.expand(products.shrink(x, pool.a), pool.b, base)
            true = pool.linear.apply(pool.linear, x, bias)[: len(owners)] + pool.expected(x[: len(owners)], owners)
            torch.testing.assert_close(output[: len(owners)], true)
            assert output.is_contiguous()


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
    names = ("lora", "lora.backend", "model_executor", "layers", "layers.quantization")
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

    class UnquantizedLinearMethod(Linear):
        def __init__(self): ...

        def create_weights(self, layer, input_size_per_partition, output_partition_sizes, params_dtype):
            shape = (sum(output_partition_sizes), input_size_per_partition)
            layer.weight = nn.Parameter(torch.randn(shape, dtype=params_dtype), requires_grad=False)

    given = {
        "layers.quantization.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
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
    return SimpleNamespace(
        registry=registry, manager=LoRAManager, runner=CudaGraphRunner, method=UnquantizedLinearMethod
    )


def batch_of(requests, lengths=None):
    mode = SimpleNamespace(is_extend=lambda: lengths is not None, is_target_verify=lambda: False)
    return SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=lengths, lora_ids=requests)


@pytest.mark.parametrize(
    ("columns", "ranks_", "replaced"), [(15, 1, False), (15, 2, False), (15, 1, True), (None, 1, False)]
)
def test_sglangs_pool_and_layers_reach_the_products(sglang, pool, columns, ranks_, replaced):
    """`ranks_`: of tensor parallelism. `replaced`: the weight, by another after it was created, as of torchao."""
    dense_adapters.register(columns)
    backend = sglang.registry["dense"]()(max_loras_per_batch=4, device=torch.device("cpu"), server_args=None)
    ends = torch.tensor(ENDS)
    base = SimpleNamespace(quant_method=sglang.method(), bias=torch.randn(OUT), reduce_results=True, tp_size=ranks_)
    base.quant_method.create_weights(base, IN, output_partition_sizes=[5, 3, 1], params_dtype=torch.float32)
    assert base.weight.shape == (OUT, IN)
    if replaced:
        base.weight = nn.Parameter(torch.randn(OUT, IN), requires_grad=False)
    for name, place in (("a@1", 0), ("c@1", 3)):
        pool.load(name, place, 8, 1.0)
    manager = sglang.manager(pool, backend, SimpleNamespace(output_offset_cpu=ends, base_layer=base))
    manager.update_lora_info()
    backend.init_cuda_graph_batch_info(max_bs_in_cuda_graph=8, num_tokens_per_bs=1)
    ranks, scalings = [8, 2, 0, 8], [1.0, 2.0, 0.0, 1.0]
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
        output = base.quant_method.apply(base, x, base.bias)
        is_stacked = bool(columns) and ranks_ == 1 and not replaced and lengths is None and fits
        assert output.is_contiguous() != is_stacked, "ranks cannot add up rows that lie apart"
        rest = {"output_offset": None, "output_offset_cpu": ends, "max_qkv_out_dim": 5}
        output = backend.run_qkv_lora(x, pool.a, pool.b, **rest, base_output=output)
        torch.testing.assert_close(output, nn.functional.linear(x, base.weight, base.bias) + pool.expected(x, owners))
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
