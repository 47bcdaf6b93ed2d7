"""Adapters of several ranks as two products: each token gets its own adapter's, and no other."""

from __future__ import annotations

import pytest
import torch

from recipe.dag.policy.dense_adapters import Products
from recipe.dag.policy.sglang_adapters import Stacked
from tests.policy.adapter_pool import ENDS, IN, OUT, PARTS, Linear, Pool


@pytest.fixture
def pool():
    pool = Pool()
    for name, place, rank, scaling in (("a@1", 0, 4, 0.5), ("b@1", 1, 2, 2.0), ("c@1", 3, 3, 1.0)):
        pool.load(name, place, rank, scaling)
    return pool


def products_of(pool: Pool, columns: int) -> Products:
    products = Products(columns, 5, "cpu")
    pool.linear = Linear()
    stacked = torch.randn(OUT + PARTS * columns, IN)
    pool.linear.weight, room = stacked.split([OUT, PARTS * columns])
    room.zero_()
    layer = products.add(pool.a, pool.b, ENDS, stacked)
    pool.stacked = Stacked(pool.linear, stacked, pool.linear.bias, products, layer)
    products.capture(164)
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
        (["a@1", None, "c@1", "a@1", None], [30, 40, 1, 45, 3]),
        ([None, None], None),
    ],
    ids=["one", "mixed", "prompts", "tiles", "base"],
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_each_token_gets_its_own_adapter(pool, requests_, lengths, in_graph):
    products = products_of(pool, columns=48)
    check(pool, products, requests_, lengths, in_graph=in_graph, padding=2 if in_graph else 0)
    assert products.one_by_one is None


def test_a_graph_reads_the_adapters_of_each_batch_at_one_address(pool):
    products = products_of(pool, columns=32)
    layer = products.layers[pool.a.data_ptr()]
    fixed = (layer.rows_a, layer.rows_b)
    read = [each.data_ptr() for each in (*fixed, products.captured.table)]
    for version in range(1, 5):  # which replace each other, in the pool and in the columns
        check(pool, products, [f"a@{version}", None, "b@1"], in_graph=True)
        assert products.columns.held.keys() == {f"a@{version}", "b@1"}
        assert [each.data_ptr() for each in (*fixed, products.tiles)] == read
        pool.load(f"a@{version + 1}", 2 if version % 2 else 0, 4 - version % 2, 1.0 + version)


def test_a_graph_of_prompts_reads_the_adapters_of_each_batch_at_one_address(pool):
    products = products_of(pool, columns=48)
    check(pool, products, ["a@1"], in_graph=True)  # as before they are captured
    products.capture_prompts(6)
    read = products.tiles.data_ptr()
    assert products.tiles[0].tolist() == [*range(6)] + [-1] * 58 + [0, 0] and not products.in_graph
    for requests, lengths in ((["c@1", "a@1"], [4, 1]), (["b@1"], [2]), ([None], [1])):
        check(pool, products, requests, lengths, in_graph=False, padding=1)
        assert products.tiles.data_ptr() == read and products.one_by_one is None
    check(pool, products, ["b@1"], [7], in_graph=False)  # no graph has as many tokens
    assert products.tiles.data_ptr() != read


def test_a_graph_has_room_for_as_many_adapters_as_sglangs_pool(pool):
    pool.load("d@1", 2, 4, 3.0)
    products = products_of(pool, columns=64)
    check(pool, products, ["a@1", "b@1", "c@1", "d@1"], in_graph=True, padding=2)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_batch_that_needs_more_columns_is_computed_one_adapter_after_the_other(pool, in_graph):
    pool.load("d@1", 2, 4, 3.0)
    products = products_of(pool, columns=32)
    check(pool, products, ["a@1", "d@1"], in_graph=in_graph)
    assert products.one_by_one is None
    check(pool, products, ["a@1", None, "b@1", "a@1", "d@1", "d@1"], in_graph=in_graph)
    assert len(products.one_by_one) == 3
    check(pool, products, ["b@1", "d@1"], in_graph=in_graph)
    assert products.one_by_one is None
