from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.vote import majority, marginals

BALLOTS = st.lists(st.sampled_from(["a", "b", "c", None]), max_size=7)
TIES = st.sampled_from(["first", "none"])


def reference_majority(ballots, ties):
    """Sorts, where the product counts."""
    cast = [ballot for ballot in ballots if ballot is not None]
    ranked = sorted(dict.fromkeys(cast), key=lambda b: (-cast.count(b), cast.index(b)))
    if not ranked or (ties == "none" and len(ranked) > 1 and cast.count(ranked[0]) == cast.count(ranked[1])):
        return None
    return ranked[0]


@pytest.mark.parametrize(
    ("ballots", "first", "none"),
    [
        ((), None, None),
        ((None, None), None, None),
        (("a", None), "a", "a"),
        (("b", "a"), "b", None),
        (("b", "a", "a", None), "a", "a"),
        (("c", "b", "b", "a", "a"), "b", None),
        ((0, 1, 0), 0, 0),
    ],
)
def test_majority(ballots, first, none):
    assert majority(ballots, "first") == first
    assert majority(ballots, "none") == none


@given(ballots=BALLOTS, ties=TIES)
def test_majority_is_the_reference(ballots, ties):
    assert majority(ballots, ties) == reference_majority(ballots, ties)


@pytest.mark.parametrize("ties", ["first", "none"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_marginals_equal_brute_force_in_every_subset_of_every_electorate(count, ties):
    """v(S) - v(S without i) for all ballots of `count` agents and all subsets S of them."""

    def value(cast):
        return float(reference_majority(cast, ties) == "a")

    for ballots in itertools.product(["a", "b", None], repeat=count):
        for subset in itertools.chain.from_iterable(itertools.combinations(ballots, k) for k in range(1, count + 1)):
            expected = [value(subset) - value(subset[:i] + subset[i + 1 :]) for i in range(len(subset))]
            assert list(marginals(subset, {"a": 1.0}, ties)) == expected


@given(ballots=BALLOTS, seed=st.randoms())
def test_the_order_of_the_ballots_does_not_matter_without_a_tie_rule(ballots, seed):
    order = list(range(len(ballots)))
    seed.shuffle(order)
    straight = marginals(ballots, {"a": 1.0, "b": 0.5}, "none")
    assert marginals([ballots[i] for i in order], {"a": 1.0, "b": 0.5}, "none") == tuple(straight[i] for i in order)


@given(ballots=BALLOTS, ties=TIES, extra=st.integers(1, 3))
def test_abstentions_contribute_nothing_and_change_nothing(ballots, ties, extra):
    values = {"a": 1.0, "b": -0.5}
    assert marginals([*ballots, *[None] * extra], values, ties) == (*marginals(ballots, values, ties), *[0.0] * extra)


def test_unknown_tie_rule():
    with pytest.raises(ValueError, match="ties: 'last'"):
        majority(["a"], "last")
