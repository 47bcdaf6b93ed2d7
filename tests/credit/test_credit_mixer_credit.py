from __future__ import annotations

import itertools

import pytest
import torch

from recipe.dag.causality import check_baseline
from recipe.dag.credit.mixer import QMIX, VDN
from recipe.dag.credit.mixer_credit import (
    blended,
    control_variate,
    counterfactual,
    explained_variance,
    mixer_weight,
    peers_of,
    sloped,
)
from recipe.dag.errors import UserError

STATE = torch.ones(1)
PARALLEL = peers_of({"a": (), "b": ()}, ["a", "b"])
FLOW = {"plan": (), "solve": ("plan",), "check": ("plan", "solve"), "aside": ()}


def everyone(utilities):
    return torch.ones_like(utilities, dtype=torch.bool)


def test_peers_are_the_other_calls_that_cannot_react():
    order = ["plan", "solve", "check", "aside"]
    assert peers_of(FLOW, order).int().tolist() == [[0, 0, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
    assert PARALLEL.int().tolist() == [[0, 1], [1, 0]]


def test_a_baseline_that_would_condition_on_a_descendant_is_an_error():
    check_baseline(FLOW, "solve", ["plan", "aside"])
    with pytest.raises(UserError, match="node plan: .*`check`, which comes after it"):
        check_baseline(FLOW, "plan", ["aside", "check"])
    with pytest.raises(UserError, match="node plan: .*its own message"):
        check_baseline(FLOW, "plan", ["plan"])


def test_forms_by_hand_for_the_sum():
    utilities, returns = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([10.0, 20.0])
    mask = everyone(utilities)
    assert counterfactual(VDN(), utilities, STATE, PARALLEL, mask).tolist() == [[-1.0, -2.0], [1.0, 2.0]]
    assert sloped(VDN(), utilities, STATE, mask).tolist() == [[-1.0, -2.0], [1.0, 2.0]]
    found = control_variate(VDN(), utilities, STATE, PARALLEL, mask, returns)
    # the other sibling's message next to one's own peer: 3 + 0, 1 + 4; 1 + 4, 3 + 0
    assert found.tolist() == [[7.0, 5.0], [15.0, 17.0]]


def test_the_local_form_counts_each_utility_by_the_slope_of_the_team_value():
    def weighted(utilities, state, mask):
        return (utilities * mask * torch.tensor([3.0, 0.5])).sum(-1)

    utilities = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    found = sloped(weighted, utilities, STATE, everyone(utilities))
    assert found.tolist() == [[-3.0, -1.0], [3.0, 1.0]]
    assert torch.equal(found, counterfactual(weighted, utilities, STATE, PARALLEL, everyone(utilities)))


def test_moving_a_constant_between_utilities_changes_no_credit():
    """The raw utilities, which MAVERL pays out, change."""
    torch.manual_seed(0)
    utilities, returns = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    moved = utilities + torch.tensor([5.0, -3.0, -2.0], dtype=torch.float64)
    peers, mask = peers_of({"a": (), "b": (), "c": ()}, ["a", "b", "c"]), everyone(utilities)
    for form in (
        lambda u: counterfactual(VDN(), u, STATE, peers, mask),
        lambda u: sloped(VDN(), u, STATE, mask),
        lambda u: control_variate(VDN(), u, STATE, peers, mask, returns),
    ):
        torch.testing.assert_close(form(moved), form(utilities))
    assert not torch.allclose(moved, utilities)


def test_siblings_have_no_order_and_absent_calls_do_not_matter():
    torch.manual_seed(1)
    mixer = QMIX(state=2, agents=3, hidden=4).double()
    utilities, state = torch.randn(5, 3).double(), torch.randn(2).double()
    mask, order = torch.rand(5, 3) < 0.7, torch.randperm(5)
    peers, returns = peers_of(FLOW, ["plan", "solve", "aside"]), torch.randn(5).double()
    junk = torch.where(mask, utilities, 1e9)
    for form in (
        lambda u, m, r: counterfactual(mixer, u, state, peers, m),
        lambda u, m, r: sloped(mixer, u, state, m),
        lambda u, m, r: control_variate(mixer, u, state, peers, m, r),
    ):
        straight = form(utilities, mask, returns)
        torch.testing.assert_close(form(utilities[order], mask[order], returns[order]), straight[order])
        torch.testing.assert_close(form(junk, mask, returns), straight)
        assert not straight[~mask].any() and not straight.requires_grad


def test_nobody_to_compare_with_is_no_credit():
    one = torch.ones(1, 2)
    assert not control_variate(VDN(), one, STATE, PARALLEL, everyone(one), torch.ones(1)).any()
    assert not counterfactual(VDN(), one, STATE, PARALLEL, everyone(one)).any()


def expected_gradient(first, second, payoff, utilities, peers, *, chained):
    """Exact: E[sum over siblings of advantage times the gradient of log pi] in the first agent's logit, for two
    siblings of two agents with two actions each. In a chain the second agent's policy depends on the first's action."""
    total = 0.0
    for joint in itertools.product((0, 1), repeat=4):
        siblings = (joint[:2], joint[2:])
        probability, returns = 1.0, []
        for a, b in siblings:
            follow = second[a] if chained else second[0]
            probability *= (first if a else 1 - first) * (follow if b else 1 - follow)
            returns.append(payoff[a][b])
        values = torch.tensor([[utilities[0][a], utilities[1][b]] for a, b in siblings])
        found = control_variate(VDN(), values, STATE, peers, everyone(values), torch.tensor(returns))
        scores = [(1 - first) if a else -first for a, _ in siblings]
        total += probability * sum(c.item() * s for c, s in zip(found[:, 0], scores, strict=True))
    return total


PAYOFF = [[0.0, 2.0], [2.0, -1.0]]
JUNK = [[3.0, -7.0], [11.0, 4.0]]
"""Utilities of a critic that learned nothing."""


@pytest.mark.parametrize("chained", [False, True])
def test_control_variate_leaves_the_expected_gradient_whatever_the_critic(chained):
    first, second = 0.3, (0.6, 0.2)
    peers = peers_of({"a": (), "b": ("a",) if chained else ()}, ["a", "b"])
    follow = second if chained else (second[0], second[0])
    low, high = ((1 - p) * payoff[0] + p * payoff[1] for p, payoff in zip(follow, PAYOFF, strict=True))
    true = 2 * first * (1 - first) * (high - low)
    for utilities in (JUNK, [[0.0, 0.0], [0.0, 0.0]]):
        found = expected_gradient(first, second, PAYOFF, utilities, peers, chained=chained)
        assert found == pytest.approx(true, abs=1e-5)


def test_a_descendant_in_the_baseline_biases_the_gradient():
    """The mutation that the check above must catch: the chain's second agent in the first one's baseline."""
    wrong = expected_gradient(0.3, (0.6, 0.2), PAYOFF, JUNK, PARALLEL, chained=True)
    right = expected_gradient(0.3, (0.6, 0.2), PAYOFF, JUNK, peers_of({"a": (), "b": ("a",)}, ["a", "b"]), chained=True)
    assert abs(wrong - right) > 0.1


def test_a_good_critic_lowers_the_variance_and_a_message_is_no_part_of_its_own_baseline():
    utilities = torch.tensor([[0.0, 1.0], [5.0, 1.0], [5.0, 0.0]])
    returns = utilities.sum(-1)
    base = returns.unsqueeze(-1) - control_variate(VDN(), utilities, STATE, PARALLEL, everyone(utilities), returns)
    changed = utilities.clone()
    changed[0, 0] = 100.0
    other = returns.unsqueeze(-1) - control_variate(VDN(), changed, STATE, PARALLEL, everyone(utilities), returns)
    assert base[0, 0] == other[0, 0] and base[1, 0] != other[1, 0]


def test_the_gate():
    actual = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(actual, actual) == 1.0
    assert explained_variance(actual + 7, actual) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), actual) == 0.0
    assert explained_variance(-actual, actual) == pytest.approx(-3.0)
    assert explained_variance(actual, torch.ones(4)) == 0.0
    assert [mixer_weight(ev) for ev in (-2.0, 0.0, 0.25, 0.5, 1.0)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    group, mixed = torch.ones(2), torch.full((2,), 3.0)
    assert blended(group, mixed, 0.0) is group and blended(group, mixed, 1.0) is mixed
    assert blended(group, mixed, 0.25).tolist() == [1.5, 1.5]
    with pytest.raises(ValueError, match="full: 0"):
        mixer_weight(0.1, full=0.0)
