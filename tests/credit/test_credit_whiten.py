from __future__ import annotations

import pytest
import torch

from recipe.dag.credit.whiten import divide_by_rms, standardize, standardize_per_policy


@pytest.mark.parametrize("spread", [1e3, 1.0, 1e-2])
def test_small_differences_count_like_large_ones(spread):
    found = standardize(torch.tensor([0.0, spread, 2 * spread], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), atol=1e-4, rtol=0)


def test_below_the_floor_of_the_variance_they_count_less_but_are_not_lost():
    low, high = standardize(torch.tensor([0.0, 1e-4], dtype=torch.float64)).tolist()
    assert -low == high == pytest.approx(5e-5 / (5e-9 + 1e-8) ** 0.5)


def test_a_value_counts_once_for_each_of_its_tokens():
    values, counts = torch.tensor([1.0, 4.0, 7.0]), torch.tensor([2, 0, 3])
    spread = torch.tensor([1.0, 1.0, 7.0, 7.0, 7.0])
    torch.testing.assert_close(standardize(values, counts)[[0, 0, 2, 2, 2]], standardize(spread))
    torch.testing.assert_close(standardize_per_policy(values, None), standardize(values))
    torch.testing.assert_close(divide_by_rms(values, counts)[[0, 0, 2, 2, 2]], divide_by_rms(spread, torch.ones(5)))
