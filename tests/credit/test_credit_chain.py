from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.types.row import Row
from tests.credit.with_defaults import gae, gae_chain
from tests.rows import with_calls

MASKS = [(1, 1, 0, 1), (1,), (0, 1, 1), (1, 0, 0, 1, 1)]
EMPTY = [(0, 0), ()]


def flat_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Plain GAE on one stream."""
    advantages, running, ahead = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * ahead - value + gamma * lam * running
        advantages.append(running)
        ahead = value
    return advantages[::-1]


def episode_rows(
    make_row, *, agents: int, turns: int, seed: int = 0, masks=MASKS, policies: int = 1, episode: int = 0
) -> list[Row]:
    """One episode: in each turn each agent makes a call of a random length; agent k has policy k % policies."""
    rng = random.Random(seed)
    return [
        make_row(
            rng.uniform(-1, 1),
            episode=episode,
            agent=f"agent{agent}",
            node=f"node{agent}",
            turn=turn,
            policy=f"policy{agent % policies}",
            mask=rng.choice(masks),
            position=turn * agents + agent,
        )
        for turn in range(turns)
        for agent in range(agents)
    ]


def values_of(rows: list[Row], seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(len(row.response_mask), generator=draw, dtype=torch.float64) for row in rows]


def of(rows, values, *, whiten=False, **config):
    return gae_chain(CreditBatch.from_rows(rows, values=values, one_policy=False), whiten=whiten, **config)


def sampled(rows: list[Row], tensors: list[torch.Tensor]) -> list[float]:
    return [
        x
        for row, t in zip(rows, tensors, strict=True)
        for x, bit in zip(t.tolist(), row.response_mask, strict=True)
        if bit
    ]


def same(one, other, **tolerance) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(torch.cat(a), torch.cat(b), **tolerance)


@pytest.mark.parametrize("agents", [1, 2, 3, 5])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("policies", [1, 2])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0)])
def test_equals_plain_gae_on_the_flattened_stream(make_row, agents, turns, policies, gamma, lam):
    for seed in range(5):
        rows = episode_rows(make_row, agents=agents, turns=turns, seed=seed, policies=policies)
        values = values_of(rows, seed)
        rewards = [0.0] * sum(sum(row.response_mask) for row in rows)
        end = 0
        for row in rows:
            end += sum(row.response_mask)
            rewards[end - 1] += row.calls[0].reward
        stream = sampled(rows, values)
        expected = flat_gae(rewards, stream, gamma, lam)
        advantages, returns = of(rows, values, gamma=gamma, lam=lam)
        assert sampled(rows, advantages) == pytest.approx(expected, abs=1e-5)
        assert sampled(rows, returns) == pytest.approx([a + v for a, v in zip(expected, stream, strict=True)], abs=1e-5)
        for row, tensor in zip(rows, advantages, strict=True):
            assert not any(x for x, bit in zip(tensor.tolist(), row.response_mask, strict=True) if not bit)


def test_one_agent_of_one_call_is_plain_gae(make_row):
    rows = [make_row(0.7, uid=f"u{i}", position=0, mask=MASKS[i]) for i in range(4)]
    values = values_of(rows)
    batch = CreditBatch.from_rows(rows, values=values)
    same(of(rows, values, gamma=0.9, lam=0.8), gae(batch, gamma=0.9, lam=0.8, whiten=False))
    same(of(rows, values, whiten=True), gae(batch, whiten=True))


@pytest.mark.parametrize("turns", [1, 3])
def test_episodes_do_not_touch_each_other(make_row, turns):
    episodes = [episode_rows(make_row, agents=2, turns=turns, seed=e, episode=e) for e in range(3)]
    rows = [row for pair in zip(*episodes, strict=True) for row in pair]
    values = values_of(rows)
    advantages, _ = of(rows, values, gamma=0.9, lam=0.9)
    for episode in range(3):
        mine = [i for i, row in enumerate(rows) if row.episode == episode]
        alone, _ = of([rows[i] for i in mine], [values[i] for i in mine], gamma=0.9, lam=0.9)
        assert all(torch.equal(advantages[i], one) for i, one in zip(mine, alone, strict=True))


def test_an_empty_replys_reward_goes_to_the_token_before_it_or_to_the_first(make_row):
    def returns_of(masks):
        rows = [
            make_row(r, agent=str(i), position=i, mask=m) for i, (r, m) in enumerate(zip((1, 2, 4), masks, strict=True))
        ]
        _, returns = of(rows, [torch.zeros(len(m)) for m in masks], lam=0.0)
        return [t.tolist() for t in returns]

    assert returns_of([(1, 1), (), (1,)]) == [[0, 3], [], [4]]
    assert returns_of([(1, 1), (1,), (0, 0)]) == [[0, 1], [6], [0, 0]]
    assert returns_of([(), (0,), (1, 1)]) == [[], [0], [3, 4]]
    assert returns_of([(), (0,), ()]) == [[], [0], []]


@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.5]))
def test_ragged_and_empty_replies_lose_and_double_no_reward(make_row, seed, gamma, lam):
    rows = episode_rows(make_row, agents=3, turns=3, seed=seed, masks=MASKS + EMPTY, policies=3)
    if not any(1 in row.response_mask for row in rows):
        return
    _, returns = of(rows, [torch.zeros(len(row.response_mask)) for row in rows])
    total = sum(row.calls[0].reward for row in rows)
    assert sampled(rows, returns)[0] == pytest.approx(total, abs=1e-5)
    advantages, _ = of(rows, values_of(rows, seed), gamma=gamma, lam=lam, whiten=True)
    assert all(torch.isfinite(t).all() and t.dtype == torch.float32 for t in advantages)


@given(seed=st.integers(0, 10_000), whiten=st.booleans())
def test_merged_rows_get_what_the_separate_rows_get(make_row, merge, seed, whiten):
    rows = episode_rows(make_row, agents=2, turns=3, seed=seed, masks=MASKS + EMPTY, policies=2)
    values = values_of(rows, seed)
    by_agent = [[i for i, row in enumerate(rows) if row.calls[0].agent == f"agent{k}"] for k in range(2)]
    merged_rows = [merge([rows[i] for i in mine]) for mine in by_agent]
    merged_values = [torch.cat([values[i] for i in mine]) for mine in by_agent]
    apart = of(rows, values, whiten=whiten, gamma=0.9, lam=0.8)
    merged = of(merged_rows, merged_values, whiten=whiten, gamma=0.9, lam=0.8)
    for one, other in zip(apart, merged, strict=True):
        for mine, found in zip(by_agent, other, strict=True):
            torch.testing.assert_close(found, torch.cat([one[i] for i in mine]))


def test_frozen_policies_are_part_of_the_environment(make_row):
    rows = episode_rows(make_row, agents=3, turns=2, masks=[(1, 1)])
    values: list = values_of(rows)
    for i in (1, 4):
        values[i] = None
    advantages, returns = of(rows, values, gamma=0.9, lam=0.8)
    assert not advantages[1].any() and not returns[4].any()
    earned = {before: rows[before].calls[0].reward + rows[gone].calls[0].reward for before, gone in ((0, 1), (3, 4))}
    left = [with_calls(row, reward=earned.get(i, row.calls[0].reward)) for i, row in enumerate(rows) if i not in (1, 4)]
    expected, _ = of(left, [v for v in values if v is not None], gamma=0.9, lam=0.8)
    same([[a for a, v in zip(advantages, values, strict=True) if v is not None]], [expected])


def test_whitening_is_per_policy_and_counts_a_zero_as_a_value(make_row):
    rows = [make_row(r, episode=i, policy="p", position=0, mask=(1,)) for i, r in enumerate((0.0, 1.0, 2.0))]
    rows += [make_row(r, episode=9 + i, policy="q", position=0, mask=(1,)) for i, r in enumerate((50.0, 0.0, 70.0))]
    advantages, returns = of(rows, [torch.zeros(1)] * 6, whiten=True)
    p, q = torch.cat(advantages[:3]).double(), torch.cat(advantages[3:]).double()
    assert p.tolist() == pytest.approx([-1, 0, 1], abs=1e-6)  # 1.0 was the mean; the 0.0 before it counted
    for part in (p, q):
        assert part.mean().item() == pytest.approx(0, abs=1e-6) and part.var().item() == pytest.approx(1, abs=1e-6)
    assert torch.cat(returns).tolist() == [0, 1, 2, 50, 0, 70]


def test_calls_at_one_place_are_refused(make_row):
    values = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(ValueError, match="two calls are at position 3"):
        of([make_row(1.0, position=3, mask=(1, 1)), make_row(1.0, position=3, mask=(1, 1))], values)
