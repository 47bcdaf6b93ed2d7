from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.batch import CreditBatch
from tests.credit.with_defaults import reinforce, reinforce_pp, reinforce_pp_baseline

REWARDS = st.lists(st.integers(-40, 40).map(lambda k: k / 8), min_size=1, max_size=8)
MASKS = [(1, 1, 0, 1), (1,), (0, 1, 1, 1, 0), (0, 0), ()]


def mixed_rows(make_row, rewards):
    return [make_row(r, uid=f"u{i}", mask=MASKS[i % len(MASKS)]) for i, r in enumerate(rewards)]


def test_returns_discount_per_sampled_token_from_the_last_one(make_row):
    _, returns = reinforce_pp(CreditBatch.from_rows([make_row(2.0, mask=(1, 0, 1, 1, 0))]), gamma=0.5)
    assert returns[0].tolist() == [0.5, 0.0, 1.0, 2.0, 0.0]


def test_gamma_zero_pays_the_last_sampled_token_only(make_row):
    _, returns = reinforce_pp(CreditBatch.from_rows([make_row(2.0, mask=(1, 1, 0))]), gamma=0.0)
    assert returns[0].tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_matches_verls_reinforce_plus_plus(make_row, gamma):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    config = pytest.importorskip("verl.trainer.config").AlgoConfig(gamma=gamma)
    masks, rewards = [(1, 1, 0, 1), (1, 1, 1, 0), (0, 1, 0, 0)], [1.0, -0.5, 0.25]
    scores = torch.zeros(3, 4)
    for row, (mask, reward) in enumerate(zip(masks, rewards, strict=True)):
        scores[row, max(t for t in range(4) if mask[t])] = reward
    expected = core_algos.compute_reinforce_plus_plus_outcome_advantage(scores, torch.tensor(masks), config)
    rows = [make_row(r, uid=f"u{i}", mask=m) for i, (r, m) in enumerate(zip(rewards, masks, strict=True))]
    result = reinforce_pp(CreditBatch.from_rows(rows), gamma=gamma)
    for ours, verls in zip(result, expected, strict=True):
        torch.testing.assert_close(torch.stack(ours), verls, rtol=1e-5, atol=1e-6)


@given(rewards=st.lists(st.integers(-40, 40).map(lambda k: k / 8), min_size=2, max_size=8, unique=True))
def test_mean_zero_and_variance_one_over_the_sampled_tokens(make_row, rewards):
    rows = mixed_rows(make_row, rewards)
    advantages, _ = reinforce_pp(CreditBatch.from_rows(rows))
    tokens, mask = torch.cat(advantages).double(), torch.tensor([b for row in rows for b in row.response_mask]).bool()
    assert tokens[mask].mean().item() == pytest.approx(0, abs=1e-5)
    assert tokens[mask].var().item() == pytest.approx(1, abs=1e-3)
    assert not tokens[~mask].any()


@given(rewards=REWARDS, gamma=st.floats(0, 1))
def test_never_nan_and_always_float(make_row, rewards, gamma):
    rows = mixed_rows(make_row, rewards)
    for tensors in reinforce_pp(CreditBatch.from_rows(rows), gamma=gamma):
        assert [len(t) for t in tensors] == [len(row.response_mask) for row in rows]
        assert all(t.dtype == torch.float32 and torch.isfinite(t).all() for t in tensors)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.0])
def test_equal_rewards_give_exactly_zero(make_row, reward):
    advantages, _ = reinforce_pp(CreditBatch.from_rows(mixed_rows(make_row, [reward] * 5)))
    assert not torch.cat(advantages).any()


@pytest.mark.parametrize("masks", [[()], [(0, 0)], [(1,)], [(0, 1), (0,)]])
def test_fewer_than_two_sampled_tokens_give_zero(make_row, masks):
    advantages, _ = reinforce_pp(CreditBatch.from_rows([make_row(1.0, mask=m) for m in masks]))
    assert not torch.cat(advantages).any()


@pytest.mark.parametrize("gamma", [1.0, 0.8, 0.0])
def test_merged_rows_get_what_the_separate_rows_get(make_row, merge, gamma):
    rng = random.Random(1)
    masks = [(1, 1), (0, 0, 1, 1), (0, 1, 0), ()]
    episodes = [
        [make_row(rng.random(), episode=e, turn=t, position=t, mask=masks[(e + t) % 4]) for t in range(3)]
        for e in range(4)
    ]
    apart = reinforce_pp(CreditBatch.from_rows([row for rows in episodes for row in rows]), gamma=gamma)
    merged = reinforce_pp(CreditBatch.from_rows([merge(rows) for rows in episodes]), gamma=gamma)
    for one, other in zip(apart, merged, strict=True):
        torch.testing.assert_close(torch.cat(one), torch.cat(other))


@pytest.mark.parametrize("gamma", [-0.1, 1.5, float("nan")])
def test_gamma_out_of_range_is_refused(make_row, gamma):
    with pytest.raises(ValueError, match="gamma"):
        reinforce_pp(CreditBatch.from_rows([make_row(1)]), gamma=gamma)


def test_reinforce_is_the_return(make_row):
    batch = CreditBatch.from_rows([make_row(2.0, mask=(1, 0, 1, 1, 0)), make_row(-1.0, episode=1, mask=(1,))])
    advantages, returns = reinforce(batch, gamma=0.5)
    assert [row.tolist() for row in advantages] == [row.tolist() for row in returns] == [[0.5, 0, 1, 2, 0], [-1]]


def test_baseline_form_by_hand(make_row):
    """Group u: 1 and 0; group v: one episode. Distances 0.5, -0.5, 0 on 2, 1 and 1 tokens: mean square 0.75 / 4."""
    rows = [make_row(1.0, mask=(1, 1)), make_row(0.0, mask=(0, 1), episode=1), make_row(7.0, uid="v", mask=(1,))]
    advantages, returns = reinforce_pp_baseline(CreditBatch.from_rows(rows))
    high = 0.5 / (0.75 / 4) ** 0.5
    torch.testing.assert_close(torch.cat(advantages), torch.tensor([high, high, 0, -high, 0]))
    assert torch.cat(returns).tolist() == [1, 1, 0, 0, 7]


@given(rewards=REWARDS, shift=st.floats(-10, 10), factor=st.floats(0.5, 100))
def test_baseline_form_ignores_the_shift_of_each_sample_and_the_scale_of_all(make_row, rewards, shift, factor):
    def found(moved, scaled):
        rows = [make_row(scaled * (r + moved * (i % 2)), uid=f"u{i % 2}", episode=i) for i, r in enumerate(rewards)]
        return torch.cat(reinforce_pp_baseline(CreditBatch.from_rows(rows))[0])

    torch.testing.assert_close(found(shift, factor), found(0, 1), rtol=0, atol=1e-3)


@given(rewards=REWARDS)
def test_baseline_form_has_mean_square_one_over_the_policys_tokens(make_row, rewards):
    rows = [make_row(r, episode=i, mask=(1,) * (1 + i % 3)) for i, r in enumerate(rewards)]
    tokens = torch.cat(reinforce_pp_baseline(CreditBatch.from_rows(rows))[0])
    assert len(set(rewards)) == 1 and not tokens.any() or tokens.square().mean().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("estimator", [reinforce, reinforce_pp])
def test_a_token_pays_its_own_penalty_and_the_later_ones_of_its_trajectory(make_row, merge, estimator):
    first, second = make_row(1.0, mask=(1, 0, 1, 1)), make_row(2.0, turn=1, mask=(1, 1))
    penalties = torch.tensor([-0.5, 9.0, -0.25, 0.125, -4.0, -1.0])
    _, (returns,) = estimator(CreditBatch.from_rows([merge([first, second])], penalties=[penalties]))
    assert returns.tolist() == [-2.625, 0.0, -2.125, -1.875, -3.0, 1.0]


@pytest.mark.parametrize("estimator", [reinforce, reinforce_pp])
@pytest.mark.parametrize("merged", [True, False])
def test_the_unit_call_pays_each_action_its_own_reward_and_penalties(make_row, merge, estimator, merged):
    first, second = make_row(1.0, mask=(1, 0, 1, 1)), make_row(2.0, turn=1, mask=(1, 1))
    rows = [merge([first, second])] if merged else [first, second]
    _, returns = estimator(CreditBatch.from_rows(rows), stat_unit="call")
    assert torch.cat(returns).tolist() == [1.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    penalties = torch.tensor([-0.5, 9.0, -0.25, 0.125, -4.0, -1.0])
    batch = CreditBatch.from_rows(rows, penalties=penalties.split([len(row.response_ids) for row in rows]))
    _, returns = estimator(batch, stat_unit="call")
    assert torch.cat(returns).tolist() == [0.375, 0.0, 0.875, 1.125, -3.0, 1.0]


def test_another_unit_is_refused(make_row):
    with pytest.raises(ValueError, match="stat_unit"):
        reinforce_pp(CreditBatch.from_rows([make_row(1)]), stat_unit="episode")


@given(rewards=REWARDS)
def test_returns_without_discount_are_the_limit_of_those_with_a_little(make_row, rewards):
    batch = CreditBatch.from_rows(mixed_rows(make_row, rewards))
    whole, nearly = (torch.cat(reinforce(batch, gamma=gamma)[1]) for gamma in (1.0, 1.0 - 1e-12))
    torch.testing.assert_close(whole, nearly)
