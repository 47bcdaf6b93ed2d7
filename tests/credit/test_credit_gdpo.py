from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.credit.batch import CreditBatch
from recipe.dag.train.selection import keep_informative
from tests.credit.with_defaults import gdpo
from tests.rows import with_calls

PAIRS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 1)), min_size=2, max_size=6)
NAMES = ("right", "short")


def rows_of(make_row, components, mask=(1, 1)):
    """One row per tuple of components."""
    return [
        make_row(float(sum(parts)), episode=i, mask=mask, parts=dict(zip(NAMES, parts, strict=False)))
        for i, parts in enumerate(components)
    ]


def credit(make_row, components, **options):
    advantages, _ = gdpo(CreditBatch.from_rows(rows_of(make_row, components)), **options)
    return torch.stack(advantages)[:, 0]


def test_small_components_count_as_much_as_large_ones(make_row):
    found = credit(make_row, [(100.0, 0.0), (0.0, 0.01), (100.0, 0.01), (0.0, 0.0)])
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 2**0.5, -(2**0.5)]), atol=1e-3, rtol=0)


@given(pairs=PAIRS, factor=st.floats(1.0, 100), shift=st.floats(-10, 10))
def test_scale_and_shift_of_a_component_do_not_matter(make_row, pairs, factor, shift):
    moved = credit(make_row, [(factor * a + shift, float(b)) for a, b in pairs])
    torch.testing.assert_close(moved, credit(make_row, pairs), atol=1e-3, rtol=0)


def test_a_node_missing_from_the_parts_paid_zero(make_row):
    rows = rows_of(make_row, [(1.0, 0.0), (0.0, 1.0)])
    left_out = [with_calls(row, parts={k: v for k, v in row.calls[0].parts.items() if v}) for row in rows]
    for one, other in zip(gdpo(CreditBatch.from_rows(left_out)), gdpo(CreditBatch.from_rows(rows)), strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))


@given(pairs=PAIRS)
def test_constant_components_and_those_of_weight_zero_have_no_effect(make_row, pairs):
    one = credit(make_row, [(a, 5) for a, _ in pairs])
    assert torch.equal(one, credit(make_row, [(a,) for a, _ in pairs]))
    assert torch.equal(one, credit(make_row, pairs, weights={"short": 0.0}))


def test_weights_are_by_name_and_the_return_is_the_weighted_sum(make_row):
    pairs = [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
    heavy = credit(make_row, pairs, weights={"right": 3.0})
    assert heavy[0] > heavy[2] > heavy[1]
    assert heavy[0] / heavy[2] == pytest.approx((3 * 2 - 1) / (2 - 3), rel=1e-5)  # in thirds of a deviation
    algorithm = make_algorithm(estimator="gdpo", weights={"right": 3.0})
    _, returns = estimate(algorithm, rows_of(make_row, pairs))
    assert [row[0].item() for row in returns] == [3.0, 0.0, 1.0]


def test_the_scale_is_the_root_mean_square_over_tokens_not_over_calls(make_row):
    """Advantages 2/3 and -1/3 deviations of 1, 1 and 4 sampled tokens: mean square (a^2 + b^2 + 4 b^2) / 6."""
    rows = [
        make_row(reward, episode=i, mask=mask, parts={"right": reward})
        for i, (reward, mask) in enumerate([(1.0, (1, 0, 0)), (0.0, (1,)), (0.0, (1, 1, 0, 1, 1))])
    ]
    advantages, _ = gdpo(CreditBatch.from_rows(rows))
    square = (4 + 1 + 4 * 1) / 6
    expected = [2 / square**0.5, -1 / square**0.5, -1 / square**0.5]
    assert [row[0].item() for row in advantages] == pytest.approx(expected, rel=1e-5)
    sampled = torch.cat(advantages)[torch.cat([torch.tensor(row.response_mask) for row in rows]).bool()]
    assert sampled.double().square().mean().item() == pytest.approx(1.0, rel=1e-5)


def test_no_rows():
    assert gdpo(CreditBatch.from_rows([])) == ([], [])


def test_a_group_whose_sums_are_equal_is_left_out_only_if_its_components_are_too(make_row):
    rows = rows_of(make_row, [(1.0, 0.0), (0.0, 1.0)])
    for weights, kept in (({}, 2), ({"right": 0.0}, 2), ({"right": 0.0, "short": 0.0}, 0)):
        algorithm = make_algorithm(estimator="gdpo", drop_zero_variance=True, weights=weights)
        assert len(keep_informative(rows, algorithm)) == kept
    assert keep_informative(rows, make_algorithm(drop_zero_variance=True)) == []
    same = rows_of(make_row, [(1.0, 0.0), (1.0, 0.0)])
    assert keep_informative(same, make_algorithm(estimator="gdpo", drop_zero_variance=True)) == []
