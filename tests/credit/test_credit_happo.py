from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.happo import LARGEST, advance, sampled_mask, update_order, weigh
from recipe.dag.credit.happo import log_ratio as log_ratio_at

GAME = torch.tensor([[0.0, 2.0], [2.0, -1.0]], dtype=torch.float64)


log_ratio = partial(log_ratio_at, level="sequence_sum", bound=4.0)


def rows(*values):
    return [torch.tensor(row, dtype=torch.float64) for row in values]


def ones(values):
    return [torch.ones_like(row) for row in values]


def test_the_first_agent_sees_the_advantages_and_the_second_sees_what_the_first_ones_update_did():
    advantages = rows([1.0, 1.0], [-2.0])
    assert weigh(advantages, ["e", "f"], {})[0] is advantages[0]
    new, old = rows([-0.5, -1.0], [-3.0]), rows([-0.7, -1.5], [-2.5])
    factor = advance({}, log_ratio(new, old, ones(new), ["e", "f"]))
    second = weigh(advantages, ["e", "f"], factor)
    torch.testing.assert_close(second[0], torch.full((2,), math.exp(0.7), dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(second[1], torch.tensor([-2 * math.exp(-0.5)], dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_policy_that_did_not_move_leaves_every_bit():
    """Then HAPPO is MAPPO: all agents have the same joint advantage."""
    advantages = [torch.randn(5), torch.randn(3)]
    old = [torch.randn(5), torch.randn(3)]
    factor = advance({}, log_ratio(old, old, ones(old), [0, 1]))
    assert all(torch.equal(a, b) for a, b in zip(weigh(advantages, [0, 1], factor), advantages, strict=True))


def test_an_agent_that_was_not_called_passes_the_factor_through():
    factor = advance(advance({}, {"e": 0.5}), {"f": 0.25})
    assert factor == {"e": 0.5, "f": 0.25}
    assert advance(factor, {}) == factor
    assert log_ratio(rows([-1.0]), rows([-2.0]), [torch.zeros(1)], ["e"]) == {}


def test_factors_multiply_over_agents_and_over_an_agents_rows():
    new, old = rows([-1.0], [-1.0, -1.0]), rows([-2.0], [-1.5, -1.25])
    found = log_ratio(new, old, [torch.ones(1), torch.tensor([1, 0])], ["e", "e"])
    assert found == {"e": pytest.approx(1.5)}
    assert advance(advance({}, found), {"e": -2.0})["e"] == pytest.approx(-0.5)


def test_masked_tokens_do_not_count_whatever_they_hold():
    new, old = rows([-1.0, float("nan")]), rows([-2.0, 3.0])
    assert log_ratio(new, old, [torch.tensor([True, False])], ["e"]) == {"e": 1.0}
    with pytest.raises(ValueError, match="unit e: a log-prob is not finite"):
        log_ratio(new, old, ones(new), ["e"])


@pytest.mark.parametrize(
    ("level", "expected"), [("sequence_sum", 8.0), ("sequence_mean", 2.0), ("clamped", math.log(4))]
)
def test_ratio_levels(level, expected):
    new, old = rows([0.0] * 4), rows([-2.0] * 4)
    assert log_ratio(new, old, ones(new), ["e"], level=level)["e"] == pytest.approx(expected)
    assert log_ratio(old, new, ones(new), ["e"], level=level)["e"] == pytest.approx(-expected)


@given(values=st.lists(st.floats(-9, 9), min_size=1, max_size=6), level=st.sampled_from(["sequence_mean", "clamped"]))
def test_approximations_agree_with_the_exact_ratio_on_its_side_of_one(values, level):
    new, old = rows(values), rows([0.0] * len(values))
    exact, near = (log_ratio(new, old, ones(new), ["e"], level=name)["e"] for name in ("sequence_sum", level))
    assert abs(near) <= abs(exact) + 1e-12 and near * exact >= 0
    if len(values) == 1 and level == "sequence_mean" or abs(exact) < math.log(2) and level == "clamped":
        assert near == pytest.approx(exact)


@pytest.mark.parametrize("level", ["sequence_sum", "sequence_mean", "clamped"])
@pytest.mark.parametrize("step", [-3.0, 3.0])
def test_four_thousand_tokens_stay_finite_and_keep_their_sign(level, step):
    new, old = [torch.zeros(4096)], [torch.full((4096,), step)]
    factor = {}
    for _ in range(4):
        factor = advance(factor, log_ratio(new, old, ones(new), ["e"], level=level))
    assert abs(factor["e"]) <= LARGEST
    weighed = weigh([torch.tensor([1e-3, -1e-3, 0.0])], ["e"], factor)[0]
    assert torch.isfinite(weighed).all()
    assert torch.sign(weighed).tolist() == [1.0, -1.0, 0.0]


def test_unknown_level_and_bound():
    with pytest.raises(ValueError, match="ratio level: 'token'"):
        log_ratio([], [], [], [], level="token")
    with pytest.raises(ValueError, match="bound: 0.5"):
        log_ratio([], [], [], [], bound=0.5)


@pytest.mark.parametrize(
    ("moved", "difference", "happo", "simultaneous"),
    [(0.36, 0.2, None, None), (0.45, -0.25, 0.90, 0.7875), (0.60, -1.0, 1.2, 0.60), (0.90, -2.5, 1.8, -0.45)],
)
def test_separating_game(moved, difference, happo, simultaneous):
    """Both agents play action 1 with 0.3, and both see that it is better. Agent 1 moves to `moved`; the expectation of
    agent 2's weighted advantage under the old policy then is its true advantage under agent 1's new one."""
    p = torch.tensor([0.7, 0.3], dtype=torch.float64)
    value = p @ GAME @ p
    assert value.item() == pytest.approx(0.75)
    assert ((p @ GAME)[1] - value).item() == pytest.approx(0.35)
    new = torch.tensor([1 - moved, moved], dtype=torch.float64)
    joint = list(itertools.product((0, 1), (0, 1)))
    ratios = log_ratio(
        [new.log()[a : a + 1] for a, _ in joint], [p.log()[a : a + 1] for a, _ in joint], [torch.ones(1)] * 4, joint
    )
    advantages = [(GAME[a, b] - value).reshape(1) for a, b in joint]
    weighed = dict(zip(joint, weigh(advantages, joint, advance({}, ratios)), strict=True))
    expected = [sum(p[a] * weighed[a, b] for a in (0, 1)).item() for b in (0, 1)]
    assert expected[1] - expected[0] == pytest.approx(difference)
    if happo is not None:
        assert (new @ GAME)[0].item() == pytest.approx(happo)
        assert (new @ GAME @ new).item() == pytest.approx(simultaneous)


def test_random_order_is_a_function_of_seed_and_step():
    agents = ["a", "b", "c", "d"]
    orders = [update_order(agents, "random", seed=1, step=step) for step in range(40)]
    assert orders == [update_order(agents, "random", seed=1, step=step) for step in range(40)]
    assert all(sorted(order) == agents for order in orders)
    assert {order[0] for order in orders} == set(agents)
    assert orders != [update_order(agents, "random", seed=2, step=step) for step in range(40)]


def test_reverse_topological_order_updates_followers_first():
    depends = {"b": ["a"], "c": ["a"], "d": ["b", "c", "d"], "a": ["env"]}
    assert update_order(["a", "b", "c", "d"], "reverse_topological", seed=0, step=0, depends=depends) == [
        "d",
        "b",
        "c",
        "a",
    ]
    assert update_order(["x", "y"], "reverse_topological", seed=0, step=0) == ["x", "y"]
    with pytest.raises(ValueError, match="a, b listen to each other"):
        update_order(["a", "b"], "reverse_topological", seed=0, step=0, depends={"a": ["b"], "b": ["a"]})
    with pytest.raises(ValueError, match="'sorted' is not one of"):
        update_order(["a"], "sorted", seed=0, step=0)


def test_a_rows_mask_is_a_tensor_of_what_was_sampled():
    assert sampled_mask([1, 0, 1]).tolist() == [True, False, True] and sampled_mask([]).tolist() == []


def test_ratios_are_as_exact_as_their_log_probs():
    for kind in (torch.float32, torch.bfloat16):
        new, old = torch.tensor([-0.1, -2.7], dtype=kind), torch.tensor([-3.3, -0.01], dtype=kind)
        exact = sum(new.tolist()) - sum(old.tolist())
        found = log_ratio([new], [old], [torch.ones(2, dtype=torch.bool)], ["e"])
        assert found["e"] == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_log_prob_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="unit e: a log-prob is not finite"):
        log_ratio([torch.tensor([value])], [torch.tensor([-1.0])], [torch.ones(1)], ["e"])
