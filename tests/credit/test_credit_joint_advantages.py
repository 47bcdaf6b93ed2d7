from __future__ import annotations

import itertools
import math

import pytest
import torch

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.core.errors import UserError
from recipe.dag.credit.causality import check_baseline
from recipe.dag.credit.joint_advantages import (
    Siblings,
    baseline_inputs,
    control_variate,
    counterfactual,
    explained_variance,
    linearized,
    mixer_weight,
)
from recipe.dag.credit.mixer import QMIX, VDN

STATE = torch.ones(1)
PARALLEL = baseline_inputs({"a": (), "b": ()}, ["a", "b"])
FLOW = {"plan": (), "solve": ("plan",), "check": ("plan", "solve"), "aside": ()}


def everyone(utilities):
    return torch.ones_like(utilities, dtype=torch.bool)


def of_all(utilities: torch.Tensor) -> Siblings:
    return Siblings(utilities, STATE, everyone(utilities), PARALLEL)


def test_a_baseline_may_read_the_other_calls_that_cannot_react():
    order = ["plan", "solve", "check", "aside"]
    assert baseline_inputs(FLOW, order).int().tolist() == [[0, 0, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
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
    assert counterfactual(VDN(), Siblings(utilities, STATE, mask, PARALLEL)).tolist() == [[-1.0, -2.0], [1.0, 2.0]]
    assert linearized(VDN(), Siblings(utilities, STATE, mask, PARALLEL)).tolist() == [[-1.0, -2.0], [1.0, 2.0]]
    found = control_variate(VDN(), Siblings(utilities, STATE, mask, PARALLEL), returns)
    # the other sibling's message next to one's own peer: 3 + 0, 1 + 4; 1 + 4, 3 + 0; and it earned 13, and 9, too much
    assert found.tolist() == [[-6.0, -8.0], [6.0, 8.0]]
    nothing = control_variate(VDN(), Siblings(0 * utilities, STATE, mask, PARALLEL), returns)
    assert nothing.tolist() == [[-10.0, -10.0], [10.0, 10.0]]


def test_the_local_form_counts_each_utility_by_the_slope_of_the_team_value():
    def weighted(utilities, state, mask):
        return (utilities * mask * torch.tensor([3.0, 0.5])).sum(-1)

    utilities = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    found = linearized(weighted, of_all(utilities))
    assert found.tolist() == [[-3.0, -1.0], [3.0, 1.0]]
    assert torch.equal(found, counterfactual(weighted, of_all(utilities)))


def test_siblings_have_no_order_and_absent_calls_do_not_matter():
    torch.manual_seed(1)
    mixer = QMIX(state=2, agents=3, hidden=4).double()
    utilities, state = torch.randn(5, 3).double(), torch.randn(2).double()
    mask, order = torch.rand(5, 3) < 0.7, torch.randperm(5)
    allowed, returns = baseline_inputs(FLOW, ["plan", "solve", "aside"]), torch.randn(5).double()
    junk = torch.where(mask, utilities, 1e9)
    for form in (
        lambda u, m, r: counterfactual(mixer, Siblings(u, state, m, allowed)),
        lambda u, m, r: linearized(mixer, Siblings(u, state, m, allowed)),
        lambda u, m, r: control_variate(mixer, Siblings(u, state, m, allowed), r),
    ):
        straight = form(utilities, mask, returns)
        torch.testing.assert_close(form(utilities[order], mask[order], returns[order]), straight[order])
        torch.testing.assert_close(form(junk, mask, returns), straight)
        assert not straight[~mask].any() and not straight.requires_grad


def test_an_episode_without_siblings_gets_no_credit():
    one = torch.ones(1, 2)
    assert not control_variate(VDN(), of_all(one), torch.ones(1)).any()
    assert not counterfactual(VDN(), of_all(one)).any()


def expected_gradient(first, second, payoff, utilities, allowed, *, chained):
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
        found = control_variate(VDN(), Siblings(values, STATE, everyone(values), allowed), torch.tensor(returns))
        scores = [(1 - first) if a else -first for a, _ in siblings]
        total += probability * sum(c.item() * s for c, s in zip(found[:, 0], scores, strict=True))
    return total


PAYOFF = [[0.0, 2.0], [2.0, -1.0]]
JUNK = [[3.0, -7.0], [11.0, 4.0]]
"""Utilities of a critic that learned nothing."""


@pytest.mark.parametrize("chained", [False, True])
def test_control_variate_leaves_the_expected_gradient_whatever_the_critic(chained):
    first, second = 0.3, (0.6, 0.2)
    allowed = baseline_inputs({"a": (), "b": ("a",) if chained else ()}, ["a", "b"])
    follow = second if chained else (second[0], second[0])
    low, high = ((1 - p) * payoff[0] + p * payoff[1] for p, payoff in zip(follow, PAYOFF, strict=True))
    true = 2 * first * (1 - first) * (high - low)
    for utilities in (JUNK, [[0.0, 0.0], [0.0, 0.0]]):
        found = expected_gradient(first, second, PAYOFF, utilities, allowed, chained=chained)
        assert found == pytest.approx(true, abs=1e-5)


def test_a_good_critic_lowers_the_variance_and_a_message_is_no_part_of_its_own_baseline():
    utilities = torch.tensor([[0.0, 1.0], [5.0, 1.0], [5.0, 0.0]])
    returns = utilities.sum(-1)
    base = returns.unsqueeze(-1) - control_variate(VDN(), of_all(utilities), returns)
    changed = utilities.clone()
    changed[0, 0] = 100.0
    other = returns.unsqueeze(-1) - control_variate(
        VDN(), Siblings(changed, STATE, everyone(utilities), PARALLEL), returns
    )
    assert base[0, 0] == other[0, 0] and base[1, 1] != other[1, 1]


def test_a_value_with_a_wrong_level_is_as_good_as_the_right_one(make_row):
    """An error that all siblings share cancels."""
    utilities = torch.tensor([[0.0, 1.0], [5.0, 1.0], [5.0, 0.0]])
    for level in (0.0, 40.0):

        def off(utilities, state, mask, level=level):
            return level + VDN()(utilities, state, mask)

        found = control_variate(off, of_all(utilities), utilities.sum(-1))
        centered = utilities - (utilities.sum(0) - utilities) / 2  # from the mean of the others, per call
        torch.testing.assert_close(found, centered.double())


def test_the_gate():
    actual = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(actual, actual) == 1.0
    assert explained_variance(actual + 7, actual) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), actual) == 0.0
    assert explained_variance(-actual, actual) == pytest.approx(-3.0)
    assert explained_variance(actual, torch.ones(4)) == 0.0
    weights = [mixer_weight(ev, gate_at_explained_variance=0.5) for ev in (-2.0, 0.0, 0.25, 0.5, 1.0)]
    assert weights == [0.0, 0.0, 0.5, 1.0, 1.0]
    with pytest.raises(ValueError, match="gate_at_explained_variance: 0"):
        mixer_weight(0.1, gate_at_explained_variance=0.0)


def gradient_of_advantages(make_row, siblings: int, weight: float, center: str) -> float:
    """Exact: the mean over siblings of E[advantage times the gradient of log pi] in the first agent's logit, of the
    advantages that a run computes; the two agents answer side by side, with probability .3 of action 1."""
    total, algorithm = 0.0, make_algorithm(estimator="vdn", scale="none", center=center)
    for joint in itertools.product(itertools.product((0, 1), repeat=2), repeat=siblings):
        probability, returns = 1.0, torch.tensor([PAYOFF[a][b] for a, b in joint], dtype=torch.float64)
        for a, b in joint:
            probability *= (0.3 if a else 0.7) * (0.3 if b else 0.7)
        values = torch.tensor([[JUNK[0][a], JUNK[1][b]] for a, b in joint], dtype=torch.float64)
        mixed = weight * control_variate(VDN(), of_all(values), returns)[:, 0]
        rows = [make_row((1 - weight) * r, episode=g, position=0, mask=(1,)) for g, r in enumerate(returns.tolist())]
        found, _ = estimate(algorithm, rows, mixer_credits=[[one] for one in mixed.tolist()])
        total += probability * sum(one.item() * (a - 0.3) for one, (a, _) in zip(found, joint, strict=True))
    return total / siblings


@pytest.mark.parametrize("siblings", [2, 3, 4])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("center", ["leave_one_out", "mean"])
def test_advantages_have_the_true_gradient_whatever_the_mixer_learned(make_row, siblings, weight, center):
    """Centring takes 1 / G of the plain share's gradient, as in every GRPO, and nothing of the mixer's."""
    true = 0.3 * 0.7 * ((0.7 * 2 + 0.3 * -1) - 0.3 * 2)
    plain = (siblings - 1) / siblings if center == "mean" else 1.0
    found = gradient_of_advantages(make_row, siblings, weight, center)
    assert found == pytest.approx(((1 - weight) * plain + weight) * true, abs=1e-6)


def test_credits_are_scaled_with_the_centered_returns_but_not_centered(make_row):
    rows = [make_row(reward, episode=g, mask=(1,)) for g, reward in enumerate((1.0, 3.0))]

    def of(*per_row, **options):
        per_call = [[credit] for credit in per_row] if per_row else None
        return [tokens.item() for tokens in estimate(make_algorithm("vdn", **options), rows, mixer_credits=per_call)[0]]

    assert of(4.0, 6.0, scale="none") == [3.0, 7.0]
    assert of(4.0, 6.0) == pytest.approx([3 / 58**0.5, 7 / 58**0.5], abs=1e-5)
    assert of(4.0, 6.0, center="leave_one_out", scale="none") == [2.0, 8.0]
    assert of() == of(0.0, 0.0) == [-of()[1], of()[1]]
    alike = [make_row(2.0, episode=g, mask=(1,)) for g in range(2)]
    found = estimate(make_algorithm("vdn", scale="none"), alike, mixer_credits=[[1.0], [-2.0]])[0]
    assert [one.item() for one in found] == [1.0, -2.0]  # equal returns may hide who helped


@pytest.mark.parametrize(("per_row", "message"), [([[1.0, 2.0]], "1 calls but 2 credits"), ([[math.nan]], "finite")])
def test_credits_that_do_not_fit_their_rows(make_row, per_row, message):
    with pytest.raises(ValueError, match=f"row of uid u, episode 0.*{message}"):
        estimate(make_algorithm("vdn"), [make_row(1.0)], mixer_credits=per_row)
