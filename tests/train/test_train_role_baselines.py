"""Moving averages as baselines: the closed form, what counts, and that a step's order does not matter."""

from __future__ import annotations

import random

import pytest
import torch

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.credit.batch import CreditBatch
from recipe.dag.train.role_baselines import RoleBaselines
from tests.credit.with_defaults import reinforce
from tests.rows import build_row, merge_rows
from tests.train.steps import run_step

ALGORITHM = make_algorithm(estimator="reinforce", ema_baseline=0.95)


def games(*rewards, role="first", **keys):
    return [build_row(reward, uid=f"u{i}", agent=role, policy="a", **keys) for i, reward in enumerate(rewards)]


def test_the_baseline_is_subtracted_and_then_moved_by_the_steps_mean():
    """b_0 = 0, A = R - b, then b <- .95 b + .05 mean(R): after t steps of mean m, b = (1 - .95^t) m."""
    baselines = RoleBaselines.for_algorithm(ALGORITHM)
    for step in range(4):
        taken = baselines.take("a", games(3.0, 1.0))
        assert taken == {"first": pytest.approx((1 - 0.95**step) * 2.0)}
        batch = CreditBatch.from_rows(games(3.0, 1.0), baselines=taken)
        for advantage, returns, reward in zip(*reinforce(batch), (3.0, 1.0), strict=True):
            mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
            torch.testing.assert_close(advantage, (reward - taken["first"]) * mask)
            torch.testing.assert_close(returns, reward * mask)


def test_each_role_of_each_policy_has_its_own():
    baselines = RoleBaselines(0.5, per_call=False)
    baselines.take("a", [*games(1.0), *games(-1.0, role="second")])
    baselines.take("b", games(5.0))
    assert baselines.state == {"a": {"first": 0.5, "second": -0.5}, "b": {"first": 2.5}}
    assert baselines.take("a", games(1.0, role="third")) == {"third": 0.0}


def test_a_trajectory_counts_once_however_many_calls_and_rows_it_has():
    split = [build_row(r, turn=turn, policy="a") for turn, r in enumerate((0.0, 1.0))]
    other = build_row(0.0, uid="other", policy="a")
    for rows in ([*split, other], [merge_rows(split), other], [other, *reversed(split)]):
        baselines = RoleBaselines(0.5, per_call=False)
        baselines.take("a", rows)
        assert baselines.state["a"]["solver"] == pytest.approx(0.25)  # the mean of 1 and 0
    by_call = RoleBaselines(0.5, per_call=True)
    by_call.take("a", [*split, other])
    assert by_call.state["a"]["solver"] == pytest.approx(0.5 / 3)


def test_rewards_in_any_order_give_the_same_number():
    rng, rewards = random.Random(0), [0.1 * i for i in range(40)]
    rows, states = games(*rewards), set()
    for _ in range(5):
        rng.shuffle(rows)
        baselines = RoleBaselines(0.95, per_call=False)
        baselines.take("a", rows)
        states.add(baselines.state["a"]["first"])
    assert len(states) == 1


def test_an_unscored_trajectory_has_no_known_return():
    baselines = RoleBaselines(0.5, per_call=False)
    baselines.take("a", [*games(1.0), *games(0.0, unscored=True, episode=1)])
    assert baselines.state["a"]["first"] == 0.5


def test_other_gammas_subtract_the_same_baseline_from_discounted_returns():
    batch = CreditBatch.from_rows(games(2.0, mask=(1, 1)), baselines={"first": 0.5})
    advantages, returns = reinforce(batch, gamma=0.5)
    assert (advantages[0].tolist(), returns[0].tolist()) == ([0.5, 1.5], [1.0, 2.0])


def test_a_step_uses_the_baselines_of_the_steps_before_and_reports_them(two_policies, monkeypatch):
    monkeypatch.setattr("recipe.dag.train.kernels.prepare", lambda policy, batch, algorithm: None)
    for kernel in ("old_log_probs", "update_actor"):
        monkeypatch.setattr(f"recipe.dag.train.kernels.{kernel}", lambda *_, **__: None)
    workflow = two_policies.model_copy(update={"algorithm": ALGORITHM})
    baselines = RoleBaselines.for_algorithm(ALGORITHM)
    for expected in (0.0, 0.1):
        step = run_step(workflow, games(2.0), baselines=baselines)
        assert step.batches["a"].columns["advantages"][0][0].item() == pytest.approx(2.0 - expected)
        assert step.metrics()["policy/a/baseline/first"] == pytest.approx(expected)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_that_forgets_nothing_or_less_is_refused(decay):
    with pytest.raises(ValueError):
        make_algorithm(estimator="reinforce", ema_baseline=decay)
    assert RoleBaselines.for_algorithm(make_algorithm("reinforce")) is None
