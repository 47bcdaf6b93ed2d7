from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.align import align


@given(have=st.integers(1, 9), count=st.integers(1, 12), seed=st.integers(0, 99))
def test_always_the_number_asked_for_and_a_function_of_the_seed(have, count, seed):
    kept = align(range(have), count, seed=seed)
    assert len(kept) == count and kept == align(range(have), count, seed=seed)
    assert sum(weight for _, weight in kept) == pytest.approx(have)
    if count >= have:
        totals = Counter()
        for call, weight in kept:
            totals[call] += weight
        assert all(totals[call] == pytest.approx(1.0) for call in range(have))
    else:
        assert len({call for call, _ in kept}) == count


def test_dropping_keeps_the_expected_weight_of_every_call():
    totals, draws = Counter(), 4000
    for seed in range(draws):
        for call, weight in align("abcde", 2, seed=seed):
            totals[call] += weight / draws
    # a call is kept with 2/5 and weighs 5/2: standard error .019
    assert all(totals[call] == pytest.approx(1.0, abs=0.08) for call in "abcde")


def test_no_calls_and_no_count():
    assert align([], 3, seed=0) == []
    with pytest.raises(ValueError, match="count: 0"):
        align([1], 0, seed=0)
