"""Calls that could not be scored, in the chains of critics: links whose reward the critic supplies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.credit.batch import CreditBatch
from tests.credit.with_defaults import gae, gae_chain, ippo, mappo
from tests.rows import build_row, merge_rows

CHAINED = {
    "gae": gae,
    "gae_chain": gae_chain,
    "ippo": ippo,
    "ippo by token": lambda batch, **options: ippo(batch, level="token", **options),
    "mappo": mappo,
    "mappo by token": lambda batch, **options: mappo(batch, level="token", **options),
}
REWARDS = st.lists(st.floats(-2, 2), min_size=2, max_size=6)


def chain_of(rewards, unscored: int | None = None):
    """One agent's calls of an episode; the reward of call `unscored` is unknown."""
    return [build_row(reward, turn=k, mask=(1, 0, 1), unscored=k == unscored) for k, reward in enumerate(rewards)]


def advantages(estimator: str, rows, *, gamma: float = 0.9, lam: float = 0.8):
    draw = torch.Generator().manual_seed(3)
    values = [torch.randn(len(row.response_mask), generator=draw).double() for row in rows]
    batch = CreditBatch.from_rows(rows, values=values)
    return values, [tensor.tolist() for tensor in CHAINED[estimator](batch, gamma=gamma, lam=lam, whiten=False)[0]]


@pytest.mark.parametrize("estimator", CHAINED)
@given(rewards=REWARDS, data=st.data())
def test_an_unknown_reward_has_no_effect_on_any_call(estimator, rewards, data):
    unscored = data.draw(st.integers(0, len(rewards) - 1))
    other = [7.0 if k == unscored else reward for k, reward in enumerate(rewards)]
    assert advantages(estimator, chain_of(rewards, unscored))[1] == advantages(estimator, chain_of(other, unscored))[1]


@pytest.mark.parametrize("estimator", CHAINED)
@given(rewards=REWARDS, data=st.data())
def test_it_counts_as_the_reward_that_the_critic_expects(estimator, rewards, data):
    """So the calls before it learn from what is earned later, and not from a reward of 0 that nobody gave."""
    unscored, by_call = data.draw(st.integers(0, len(rewards) - 1)), estimator in ("ippo", "mappo")
    values, found = advantages(estimator, chain_of(rewards, unscored))
    # a step of a call begins with its first token; the last token pays where every token is a step
    before = values[unscored][0 if by_call else 2].item()
    after = values[unscored + 1][0].item() if unscored + 1 < len(rewards) else 0.0
    expected = [before - 0.9 * after if k == unscored else reward for k, reward in enumerate(rewards)]
    known = advantages(estimator, chain_of(expected))[1]
    assert [x for row in found for x in row] == pytest.approx([x for row in known for x in row], abs=1e-5)


@pytest.mark.parametrize("estimator", CHAINED)
def test_calls_after_it_keep_their_advantages(estimator):
    scored, unknown = (advantages(estimator, chain_of([1.0, 0.5, -1.0, 2.0], k))[1] for k in (None, 1))
    assert scored[2:] == unknown[2:] and scored[0] != unknown[0]


def test_the_unknown_reward_of_an_agent_without_tokens_is_paid_where_it_acted():
    """A frozen agent's reward belongs to the token before it; if it is unknown, so is what that token earned."""
    rows = chain_of([1.0, 0.0])
    frozen = build_row(0.0, agent="judge", position=2, mask=(), unscored=True)
    values = [torch.tensor([0.3, 0.0, 0.5]), torch.tensor([0.2, 0.0, 0.4]), None]
    batch = CreditBatch.from_rows([*rows, frozen], values=values)
    found, _ = gae_chain(batch, gamma=1.0, lam=1.0, whiten=False)
    # the last token of the second call has a delta of 0, so what is left is 1.0 and the value of its first token
    assert found[1].tolist() == pytest.approx([0.4 - 0.2, 0.0, 0.0], abs=1e-6)
    assert found[0].tolist() == pytest.approx([1.0 + 0.4 - 0.3, 0.0, 1.0 + 0.4 - 0.5], abs=1e-6)


def test_merged_calls_know_which_of_them_is_unknown():
    split = chain_of([1.0, 0.5, 2.0], 1)
    values, apart = advantages("gae", split)
    found, _ = gae(
        CreditBatch.from_rows([merge_rows(split)], values=[torch.cat(values)]), gamma=0.9, lam=0.8, whiten=False
    )
    assert found[0].tolist() == pytest.approx([x for row in apart for x in row], abs=1e-6)
