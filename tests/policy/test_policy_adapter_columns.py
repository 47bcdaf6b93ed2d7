"""Columns of adapters that come and go, and the tiles of a batch."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

from recipe.dag.policy.adapter_columns import TILE, Columns, Span, tiles_of
from recipe.dag.workflow.adapter_shape import columns_of


def test_columns_are_those_of_adapters_that_were_not_used_for_longest():
    columns = Columns(64)
    assert columns.take({"a": 32, "b": 9}) == ["a", "b"]
    assert columns.take({"a": 32}) == []
    assert columns.take({"c": 32}) == ["c"] and columns.held == {"a": Span(0, 32), "c": Span(32, 32)}
    assert columns.take({"a": 32, "b": 9, "c": 32}) is None and columns.held.keys() == {"a", "c"}
    assert columns.take({"d": 64}) == ["d"] and columns.held == {"d": Span(0, 64)}


def test_adapters_move_where_what_is_free_is_in_pieces():
    columns = Columns(64)
    columns.take({"a": 16})
    columns.take({"b": 16})
    columns.take({"c": 32})
    columns.take({"b": 16})  # between a and c
    assert columns.take({"b": 16, "d": 48}) == ["b", "d"]
    assert columns.held == {"b": Span(0, 16), "d": Span(16, 48)}


def test_columns_never_overlap():
    draw = random.Random(0)
    columns = Columns(128)
    for _ in range(500):
        ranks = {f"a{draw.randrange(9)}": draw.choice([8, 16, 40, 64]) for _ in range(draw.randrange(1, 5))}
        held = dict(columns.held)
        ranks = {name: held[name].size if name in held else rank for name, rank in ranks.items()}
        new = columns.take(ranks)
        if new is None:
            continue
        assert all(held.get(name) == columns.held[name] for name in ranks.keys() - set(new)), "no copy is made of these"
        spans = sorted(columns.held.values())
        assert all(first.end <= second.start for first, second in pairwise(spans)) and spans[-1].end <= 128
        assert all(columns.held[name].size == columns_of(rank) for name, rank in ranks.items())


def test_a_tile_has_tokens_of_one_adapter():
    spans = {"a": Span(16, 32), "b": Span(0, 16)}
    requests, lengths = ["a", None, "b", "a"], [70, 3, 1, 60]
    owner = np.array(["a"] * 70 + ["-"] * 3 + ["b"] + ["a"] * 60 + ["-"] * 16)
    for rows, number in ((None, None), (150, 150 // TILE + 3)):
        table = tiles_of(requests, lengths, spans, rows=rows, number=number)
        tokens = [token for tile in table for token in tile[:TILE] if token >= 0]
        assert sorted(tokens) == [*range(rows or 134)], "each token once"
        for tile in table:
            owners, steps = {*owner[tile[:TILE][tile[:TILE] >= 0]]}, tile[TILE:].tolist()
            assert (owners, steps) in (({"a"}, [1, 2]), ({"b"}, [0, 1]), ({"-"}, [0, 0]), (set(), [-1, -1]))
    # a CUDA graph of fewer tokens reads the first tiles alone
    for tokens in (134, 140, 149):
        read = table[: tokens // TILE + 3, :TILE]
        assert {*range(tokens)} <= {*read.flatten().tolist()}
    assert tiles_of(["b", None], None, spans)[:, 0].tolist() == [0, 1]
