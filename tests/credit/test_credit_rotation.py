from __future__ import annotations

from collections import Counter

import pytest

from recipe.dag.train.alternation import bindings


def test_pioneer_and_observer_change_places_every_five_steps():
    played = [bindings(("pioneer", "observer"), ("a", "b"), every=5, step=step)["pioneer"] for step in range(20)]
    assert played == ["a"] * 5 + ["b"] * 5 + ["a"] * 5 + ["b"] * 5


def test_with_three_roles_each_takes_over_the_policy_of_the_next():
    turned = [bindings(("x", "y", "z"), ("a", "b", "c"), every=2, step=step) for step in (1, 2, 4, 6)]
    assert ["".join(bound[role] for role in "xyz") for bound in turned] == ["abc", "bca", "cab", "abc"]


@pytest.mark.parametrize("roles", [("x",), ("x", "y"), ("x", "y", "z")])
@pytest.mark.parametrize("every", [1, 3])
def test_every_policy_plays_every_role_equally_long_and_never_two_at_once(roles, every):
    policies = [f"p{i}" for i in range(len(roles))]
    played = Counter()
    for step in range(every * len(roles)):
        bound = bindings(roles, policies, every=every, step=step)
        assert sorted(bound.values()) == policies
        played.update(bound.items())
    assert set(played.values()) == {every} and len(played) == len(roles) ** 2
