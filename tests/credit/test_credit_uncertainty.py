from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.agent_share import weighted
from recipe.dag.credit.uncertainty import surprise
from tests.credit.with_defaults import uncertainty_weights
from tests.rows import build_row, merge_rows


def weights(means, group=None, **options):
    surprises = [surprise([-2 * m, 99.0, 0.0], [1, 0, 1]) for m in means]
    return uncertainty_weights(surprises, group or ["g"] * len(means), **options)


def test_by_hand():
    """Mean negative log-probs 1, 2, 3: z = -1, 0, 1."""
    assert weights([1.0, 2.0, 3.0]) == pytest.approx([math.exp(0.25), 1.0, math.exp(-0.25)])
    assert weights([1.0, 2.0, 3.0], alpha=0.0) == [1.0] * 3
    assert weights([0.0] * 9 + [9.0], bound=0.5)[-1] == pytest.approx(math.exp(-0.125))
    rows = [merge_rows([build_row(agent="a", mask=(1, 1)), build_row(agent="b", mask=(1,))]), build_row(mask=(1,))]
    advantages = [torch.tensor([2.0, -1.0, 4.0]), torch.tensor([3.0])]
    found = weighted(rows, advantages, [{"a": 0.5, "b": 0.25}, {"solver": 1.0}])
    assert [row.tolist() for row in found] == [[1.0, -0.5, 1.0], [3.0]]


def test_groups_of_one_and_groups_without_a_difference_keep_their_advantages():
    assert weights([1.0, 2.0], group=["g", "h"]) == [1.0, 1.0]
    assert weights([1.0, 1.000001]) != [1.0, 1.0]
    assert weights([0.1 + 0.2, 0.3]) == weights([0.0, 5e-273]) == [1.0, 1.0]
    assert surprise([-1.0], [0]) is None and uncertainty_weights([None, 1.0, 2.0], "ggg")[0] == 1.0


@given(means=st.lists(st.floats(0, 9), min_size=1, max_size=6), shift=st.floats(0, 9))
def test_signs_stay_and_only_differences_matter(means, shift):
    found = weights(means)
    assert all(0 < weight <= math.exp(0.25 * 5) + 1e-6 for weight in found)
    spread = max(means) - min(means)
    if spread > 1e-2:
        assert weights([m + shift for m in means]) == pytest.approx(found, abs=1e-2)
