from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.report.pass_at_k import (
    atleast_k_at_n,
    average_at_n,
    estimate_pass_at_k,
    majority_at_n,
    outcomes_by_problem,
    pass_at_k,
)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_estimate_is_the_mean_over_all_draws(n):
    for correct in range(n + 1):
        outcomes = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            exact = fmean(any(draw) for draw in combinations(outcomes, k))
            assert estimate_pass_at_k(n, correct, k) == pytest.approx(exact)


@pytest.mark.parametrize(("n", "correct", "k"), [(2, 3, 1), (2, 1, 3), (2, 1, 0), (0, 0, 1), (2, -1, 1)])
def test_impossible_counts_are_refused(n, correct, k):
    with pytest.raises(ValueError):
        estimate_pass_at_k(n, correct, k)


def test_problems_with_fewer_episodes_are_left_out_of_larger_k():
    problems = [[True, False], [False]]
    assert pass_at_k(problems, 1) == pytest.approx(0.25)
    assert pass_at_k(problems, 2) == 1.0
    with pytest.raises(ValueError, match="3 graded"):
        pass_at_k(problems, 3)
    assert average_at_n(problems) == pytest.approx(0.25)
    with pytest.raises(ValueError):
        average_at_n([])


outcomes_of_four = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=9)


@given(outcomes_of_four)
def test_at_least_one_of_n_is_pass_at_n_and_all_of_n_the_products(problems):
    assert atleast_k_at_n(problems, 1, 4) == pytest.approx(pass_at_k(problems, 4))
    assert atleast_k_at_n(problems, 4, 4) == pytest.approx(fmean(float(all(outcomes)) for outcomes in problems))
    shares = [atleast_k_at_n(problems, k, 4) for k in range(1, 5)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) / 4 == pytest.approx(average_at_n(problems)), "a mean is the sum of its tail probabilities"
    assert majority_at_n(problems, 4) == atleast_k_at_n(problems, 3, 4), "a tie is no majority"


def test_a_majority_is_more_than_half():
    assert majority_at_n([[True, False], [True, True]], 2) == 0.5
    assert majority_at_n([[True, False, True], [False, False, True]], 3) == 0.5
    assert majority_at_n([[True]], 1) == 1.0


def test_only_problems_with_all_episodes_count():
    problems = [[True, True, False], [True]]
    assert majority_at_n(problems, 3) == atleast_k_at_n(problems, 2, 3) == 1.0
    assert atleast_k_at_n(problems, 3, 3) == 0.0
    for n, k in ((4, 2), (3, 4), (3, 0)):
        with pytest.raises(ValueError):
            atleast_k_at_n(problems, k, n)
    with pytest.raises(ValueError, match="no problem has 2 graded"):
        majority_at_n(problems, 2)


def test_faulted_and_ungraded_episodes_are_no_wrong_answers(make_episode, fault):
    episodes = [
        make_episode("b", 0, outcome=1.0),
        make_episode("a", 0, outcome=0.0),
        make_episode("b", 1, outcome=0.0, fault=fault),
        make_episode("a", 1, outcome=None),
        make_episode("c", 0, outcome=None),
        make_episode("d", 0, outcome=0.5),
        make_episode("d", 1, outcome=0.49),
    ]
    assert outcomes_by_problem(episodes) == [[True], [False], [True, False]]
