from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.gdpo import gdpo

PAIRS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 1)), min_size=2, max_size=6)


def credit(make_row, components, **options):
    rows = [make_row(0.0, episode=i, mask=(1, 1)) for i in range(len(components))]
    table = torch.tensor(components, dtype=torch.float64)
    return torch.stack(gdpo(CreditBatch.from_rows(rows), table, **options))[:, 0]


def test_small_components_count_as_much_as_large_ones(make_row):
    found = credit(make_row, [(100.0, 0.0), (0.0, 0.01), (100.0, 0.01), (0.0, 0.0)])
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 2**0.5, -(2**0.5)]), atol=1e-3, rtol=0)


@given(pairs=PAIRS, factor=st.floats(1.0, 100), shift=st.floats(-10, 10))
def test_scale_and_shift_of_a_component_do_not_matter(make_row, pairs, factor, shift):
    moved = credit(make_row, [(factor * a + shift, float(b)) for a, b in pairs])
    torch.testing.assert_close(moved, credit(make_row, pairs), atol=1e-3, rtol=0)


@given(pairs=PAIRS)
def test_a_constant_component_and_one_without_weight_are_nothing(make_row, pairs):
    one = credit(make_row, [(a, 5) for a, _ in pairs])
    assert torch.equal(one, credit(make_row, [(a,) for a, _ in pairs]))
    assert torch.equal(one, credit(make_row, pairs, weights=(1.0, 0.0)))


def test_wrong_shapes_are_refused(make_row):
    for components, weights in (([(1.0, 2.0)], (1.0,)), ([(1.0,), (2.0,)], (1.0, 1.0))):
        with pytest.raises(ValueError, match="does not fit"):
            credit(make_row, components, weights=weights)
