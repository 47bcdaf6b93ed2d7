from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from recipe.dag.report.pass_at_k import average_at_n, estimate_pass_at_k, outcomes_by_problem, pass_at_k


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


def test_faulted_and_ungraded_episodes_are_no_wrong_answers(make_episode, fault):
    episodes = [
        make_episode("b", 0, outcome=1.0),
        make_episode("a", 0, outcome=0.0),
        make_episode("b", 1, outcome=0.0, fault=fault),
        make_episode("a", 1, outcome=None),
        make_episode("c", 0, outcome=None),
    ]
    assert outcomes_by_problem(episodes) == [[True], [False]]
