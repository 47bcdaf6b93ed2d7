from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.train.packing import PAD, end_to_end, layout, scatter_back

LENGTHS, MANY = (st.lists(st.integers(1, 4000), min_size=least, max_size=70) for least in (1, 8))
SIZES = st.fixed_dictionaries(
    {"ranks": st.integers(1, 8), "mini_batches": st.integers(1, 6), "micro_batch": st.integers(1, 9)}
)


def pieces_of(order: list[int], count: int) -> list[list[int]]:
    height = len(order) // count
    return [order[k * height : (k + 1) * height] for k in range(count)]


@given(LENGTHS, SIZES)
def test_every_row_is_used_once_with_the_least_padding_that_makes_the_pieces_equal(lengths, sizes):
    order, mini_batches = layout(lengths, **sizes)
    assert sorted(i for i in order if i != PAD) == list(range(len(lengths)))
    assert 1 <= mini_batches <= sizes["mini_batches"]
    count = sizes["ranks"] * mini_batches
    tallest = -(-len(lengths) // count)
    height = -(-tallest // sizes["micro_batch"]) * sizes["micro_batch"]
    assert len(order) == count * height
    pieces = pieces_of(order, count)
    held = [sum(i != PAD for i in piece) for piece in pieces]
    assert max(held) - min(held) <= 1
    for piece in pieces:
        weights = [0 if i == PAD else lengths[i] for i in piece]
        assert weights == sorted(weights)
    values = ["padding" if i == PAD else lengths[i] for i in order]
    assert scatter_back(values, order, len(lengths)) == lengths


@given(LENGTHS, SIZES)
def test_no_mini_batch_is_padding_alone(lengths, sizes):
    order, mini_batches = layout(lengths, **sizes)
    pieces = pieces_of(order, sizes["ranks"] * mini_batches)
    for m in range(mini_batches):  # verl gives rank r the pieces [r * mini_batches, (r + 1) * mini_batches)
        assert any(i != PAD for r in range(sizes["ranks"]) for i in pieces[r * mini_batches + m])
    if mini_batches > 1:
        assert all(any(i != PAD for i in piece) for piece in pieces)


@given(LENGTHS, SIZES, st.text(max_size=3))
def test_a_shuffled_layout_has_the_same_shape_and_rows_and_is_a_function_of_its_seed(lengths, sizes, seed):
    plain, shuffled = layout(lengths, **sizes), layout(lengths, **sizes, shuffle=seed)
    assert (len(shuffled[0]), shuffled[1]) == (len(plain[0]), plain[1])
    assert sorted(shuffled[0]) == sorted(plain[0])
    assert shuffled == layout(lengths, **sizes, shuffle=seed)
    count = sizes["ranks"] * plain[1]
    held = [sum(i != PAD for i in piece) for piece in pieces_of(shuffled[0], count)]
    assert max(held) - min(held) <= 1


@given(MANY, st.integers(1, 4), st.integers(1, 3), st.none() | st.text())
def test_pieces_weigh_about_the_same(lengths, ranks, mini_batches, seed):
    order, mini_batches = layout(lengths, ranks=ranks, mini_batches=mini_batches, shuffle=seed)
    weights = [sum(lengths[i] for i in piece if i != PAD) for piece in pieces_of(order, ranks * mini_batches)]
    assert max(weights) - min(weights) <= 2 * max(lengths)


def test_rows_share_a_mini_batch_with_other_rows_from_seed_to_seed():
    layouts = [layout([7] * 12, ranks=1, mini_batches=3, shuffle=str(seed))[0] for seed in range(20)]
    partners = {tuple(sorted(piece)) for order in layouts for piece in pieces_of(order, 3) if 0 in piece}
    assert len(partners) > 8


def test_epochs_lie_end_to_end_in_every_ranks_part():
    first, second = [0, 1, 2, 3, 4, PAD], [3, 0, 1, 4, PAD, 2]
    assert end_to_end([first, second], ranks=2) == [0, 1, 2, 3, 0, 1, 3, 4, PAD, 4, PAD, 2]
    assert end_to_end([first], ranks=3) == first


def test_fewer_rows_than_ranks_make_one_mini_batch():
    order, mini_batches = layout([5, 9, 7], ranks=4, mini_batches=3)
    assert (order, mini_batches) == ([1, 2, 0, PAD], 1)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        layout([], ranks=1, mini_batches=1)


def test_scatter_back_refuses_values_of_another_layout():
    with pytest.raises(ValueError):
        scatter_back([1, 2], [0, 1, PAD], 2)
