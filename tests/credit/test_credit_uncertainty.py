from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.uncertainty import uncertainty_weighted


def weights(means, group=None, **options):
    rows = [torch.tensor([-2 * m, 99.0, 0.0]) for m in means]
    mask = [torch.tensor([1, 0, 1])] * len(rows)
    ones = [torch.ones(3)] * len(rows)
    return [row[0].item() for row in uncertainty_weighted(ones, rows, mask, group or ["g"] * len(rows), **options)]


def test_by_hand():
    """Mean negative log-probs 1, 2, 3: z = -1, 0, 1."""
    torch.testing.assert_close(weights([1.0, 2.0, 3.0]), [math.exp(0.25), 1.0, math.exp(-0.25)])
    assert weights([1.0, 2.0, 3.0], alpha=0.0) == [1.0] * 3


def test_groups_of_one_and_groups_without_a_difference_keep_their_advantages():
    assert weights([1.0, 2.0], group=["g", "h"]) == [1.0, 1.0]
    assert weights([0.1 + 0.2, 0.3]) == [1.0, 1.0]
    silent = uncertainty_weighted([torch.ones(1)], [torch.zeros(1)], [torch.zeros(1)], ["g"])
    assert silent[0].item() == 1.0


@given(means=st.lists(st.floats(0, 9), min_size=1, max_size=6), shift=st.floats(0, 9))
def test_signs_stay_and_only_differences_matter(means, shift):
    found = weights(means)
    assert all(0 < weight <= math.exp(0.25 * 5) + 1e-6 for weight in found)
    spread = max(means) - min(means)
    if spread > 1e-2:
        torch.testing.assert_close(weights([m + shift for m in means]), found, atol=1e-2, rtol=0)
