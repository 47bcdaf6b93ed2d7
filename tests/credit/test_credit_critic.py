from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.critic import Utterance, history_parts
from tests.credit.with_defaults import gae, gae_chain, ippo, mappo
from tests.rows import with_calls

FREE = {"whiten": False}
ORDERS = st.permutations(range(12))


def debate(make_row, seed, mask=(1, 1, 0, 1)):
    """Two agents, two turns, three episodes; random values."""
    rng = random.Random(seed)
    rows = [
        make_row(rng.randint(0, 4) / 4, episode=e, agent=agent, node=agent, turn=t, position=2 * t + i, mask=mask)
        for e in range(3)
        for t in range(2)
        for i, agent in enumerate(("a", "b"))
    ]
    return rows, [torch.tensor([rng.random() for _ in row.response_mask]) for row in rows]


def first(tokens):
    return [row[0].item() for row in tokens]


def test_marfts_published_fixture(make_row):
    """gamma .99, lambda .95, V = (.2, .5), reward 1 at the end: .76525 and .5, and not 1.76525."""
    rows = [make_row(0.0, agent="a", position=0, mask=(1,)), make_row(1.0, agent="b", position=1, mask=(1,))]
    batch = CreditBatch.from_rows(rows, values=[torch.tensor([0.2]), torch.tensor([0.5])])
    for level in ("action", "token"):
        advantages, returns = mappo(batch, level=level, gamma=0.99, lam=0.95, **FREE)
        assert first(advantages) == pytest.approx([0.76525, 0.5]) and advantages[0].dtype == torch.float32
        assert first(returns) == pytest.approx([0.96525, 1.0])


def test_one_step_episodes_are_reward_less_value(make_row):
    rows, values = debate(make_row, 0)
    batch = CreditBatch.from_rows(rows, values=values)
    advantages, returns = ippo(batch, stream="call", **FREE)
    rewards = [row.calls[0].reward for row in rows]
    expected = [reward - value[0].item() for reward, value in zip(rewards, values, strict=True)]
    assert first(advantages) == pytest.approx(expected)
    assert first(returns) == pytest.approx(rewards)


def test_an_agents_stream_skips_the_others(make_row):
    rows, values = debate(make_row, 1)
    batch = CreditBatch.from_rows(rows, values=values)
    advantages, _ = ippo(batch, stream="agent", gamma=0.9, lam=0.5, **FREE)
    calls = [row.calls[0] for row in rows]
    for i, call in enumerate(calls):
        late = calls[i + 2].reward - values[i + 2][0].item() if call.turn == 0 else 0.0
        step = call.reward - values[i][0].item() + (0.9 * values[i + 2][0].item() if call.turn == 0 else 0.0)
        assert advantages[i][0].item() == pytest.approx(step + 0.45 * late, rel=1e-5)
    rows[1] = with_calls(rows[1], reward=9.0)
    moved, _ = ippo(CreditBatch.from_rows(rows, values=values), stream="agent", gamma=0.9, lam=0.5, **FREE)
    assert [i for i in range(len(rows)) if not torch.equal(moved[i], advantages[i])] == [1]


def test_token_level_forms_are_the_token_estimators(make_row):
    rows, values = debate(make_row, 2)
    batch = CreditBatch.from_rows(rows, values=values)
    for one, other in ((ippo, gae), (mappo, gae_chain)):
        found = one(batch, level="token", gamma=0.9, lam=0.8)
        assert all(map(torch.equal, found[0] + found[1], sum(other(batch, gamma=0.9, lam=0.8), [])))


@given(seed=st.integers(0, 999), stream=st.sampled_from(["call", "agent", "team"]))
@settings(max_examples=30)
def test_undiscounted_action_and_token_level_agree_at_the_first_token(make_row, seed, stream):
    rows, values = debate(make_row, seed)
    batch = CreditBatch.from_rows(rows, values=values)
    estimator = mappo if stream == "team" else lambda b, **o: ippo(b, stream=stream, **o)
    action, token = (estimator(batch, level=level, gamma=1.0, lam=1.0, **FREE)[0] for level in ("action", "token"))
    assert first(action) == pytest.approx(first(token), abs=1e-5)


FORMS = {
    "mappo": mappo,
    "mappo, token": partial(mappo, level="token"),
    "ippo": ippo,
    "ippo, agent": partial(ippo, stream="agent"),
    "ippo, agent, token": partial(ippo, stream="agent", level="token"),
}


@given(form=st.sampled_from(list(FORMS)), seed=st.integers(0, 999), padding=st.integers(1, 5), order=ORDERS)
@settings(max_examples=20)
def test_row_order_and_padding_change_nothing(make_row, form, seed, padding, order):
    rows, values = debate(make_row, seed)
    straight = FORMS[form](CreditBatch.from_rows(rows, values=values))
    longer, more = debate(make_row, seed, mask=(1, 1, 0, 1) + (0,) * padding)
    more = [torch.cat([value, torch.full((padding,), 7.0)]) for value in values]
    shuffled = FORMS[form](CreditBatch.from_rows([longer[i] for i in order], values=[more[i] for i in order]))
    for expected, found in zip(straight, shuffled, strict=True):
        for place, row in zip(order, found, strict=True):
            torch.testing.assert_close(row[:4], expected[place])
            assert not row[4:].any()


def paid(rows, change):
    return [with_calls(row, reward=change(row.calls[0].reward)) for row in rows]


@given(form=st.sampled_from(list(FORMS)), seed=st.integers(0, 999), factor=st.floats(0.1, 50))
@settings(max_examples=20)
def test_rewards_and_values_in_another_unit_scale_the_credit_and_not_what_is_whitened(make_row, form, seed, factor):
    rows, values = debate(make_row, seed)
    other = CreditBatch.from_rows(
        paid(rows, lambda r: r * factor), values=[value.double() * factor for value in values]
    )
    batch = CreditBatch.from_rows(rows, values=values)
    for one, scaled in zip(FORMS[form](batch, gamma=0.9, **FREE), FORMS[form](other, gamma=0.9, **FREE), strict=True):
        torch.testing.assert_close(torch.cat(scaled), torch.cat(one) * factor, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(FORMS[form](other)[0]), torch.cat(FORMS[form](batch)[0]), rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 999), shift=st.floats(-5, 5))
@settings(max_examples=20)
def test_a_critic_that_foresees_a_bonus_takes_it_out_of_the_credit(make_row, seed, shift):
    """Holds for `stream="call"`; in longer sequences a bonus on every call would count once per call."""
    rows, values = debate(make_row, seed)
    moved = CreditBatch.from_rows(paid(rows, lambda r: r + shift), values=[value + shift for value in values])
    plain = ippo(CreditBatch.from_rows(rows, values=values), stream="call", **FREE)[0]
    torch.testing.assert_close(torch.cat(ippo(moved, stream="call", **FREE)[0]), torch.cat(plain), rtol=1e-4, atol=1e-5)


def no_values(rows):
    """A critic that expects nothing."""
    return CreditBatch.from_rows(rows, values=[torch.zeros(len(row.response_mask)) for row in rows])


def test_a_call_that_sampled_nothing_leaves_its_reward_to_the_one_before_it(make_row):
    rows = [make_row(r, position=i, turn=i, mask=m) for i, (r, m) in enumerate([(1.0, (0,)), (2.0, (1,)), (4.0, ())])]
    batch = no_values(rows)
    assert [row.tolist() for row in ippo(batch, stream="agent", **FREE)[0]] == [[0.0], [7.0], []]
    assert [row.tolist() for row in ippo(batch, stream="call", **FREE)[0]] == [[0.0], [2.0], []]
    late = make_row(8.0, episode=1, position=0, mask=(1,))
    batch = no_values([make_row(4.0, position=0, mask=()), make_row(1.0, position=1, mask=(1,)), late])
    assert [row.tolist() for row in ippo(batch, stream="agent", **FREE)[0]] == [[], [5.0], [8.0]]
    empty = CreditBatch.from_rows([])
    assert ippo(empty) == mappo(empty) == ([], [])


@pytest.mark.parametrize("level", ["action", "token"])
def test_calls_without_values_are_no_steps_and_their_rewards_move_to_the_one_before(make_row, level):
    """A frozen policy's call between two others: discounting does not count it, and its reward is not lost."""
    rows = [
        make_row(1.0, agent="a", policy="p", position=0, mask=(1,)),
        make_row(2.0, agent="f", policy="frozen", position=1, mask=(1,)),
        make_row(4.0, agent="b", policy="q", position=2, mask=(1,)),
    ]
    values = [torch.tensor([0.5]), None, torch.tensor([0.25])]
    batch = CreditBatch.from_rows(rows, values=values, one_policy=False)
    advantages, returns = mappo(batch, level=level, gamma=0.5, lam=0.0, whiten=False)
    assert first(advantages) == [3.0 + 0.5 * 0.25 - 0.5, 0.0, 4.0 - 0.25]
    assert first(returns) == [3.0 + 0.5 * 0.25, 0.0, 4.0]


@pytest.mark.parametrize("level", ["action", "token"])
def test_each_policy_is_whitened_by_itself_over_its_tokens(make_row, level):
    rows, values = debate(make_row, 3)
    rows = [replace(row, policy=row.calls[0].agent) for row in rows]
    advantages, _ = mappo(CreditBatch.from_rows(rows, values=values, one_policy=False), level=level)
    raw, _ = mappo(CreditBatch.from_rows(rows, values=values, one_policy=False), level=level, **FREE)
    for policy in "ab":
        mine = [i for i, row in enumerate(rows) if row.policy == policy]
        sampled = torch.cat([advantages[i][torch.tensor(rows[i].response_mask).bool()] for i in mine]).double()
        assert sampled.mean().item() == pytest.approx(0, abs=1e-6) and sampled.var().item() == pytest.approx(1)
        order = sorted(mine, key=lambda i: raw[i][0].item())
        assert order == sorted(mine, key=lambda i: advantages[i][0].item())


def test_unknown_options_are_refused(make_row):
    batch = CreditBatch.from_rows([make_row(1), make_row(1, turn=1)])
    for options in ({"stream": "team"}, {"level": "word"}, {"gamma": 2.0}, {"lam": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ippo(batch, **options)


def joint_history(question, history, speaker, *, max_chars=4000) -> str:
    return "".join(history_parts(question, history, speaker, max_chars=max_chars))


def test_joint_history_holds_what_all_said_and_tells_roles_and_speakers_apart():
    history = [Utterance("a", 0, "four"), Utterance("b", 0, "x" * 20 + "y" * 10)]
    a, b = Utterance("a", 1, "not yet said"), Utterance("b", 1, "")
    text = joint_history("2 + 2?", history, a, max_chars=10)
    assert text == "2 + 2?\n\n[turn 0] a:\nfour\n\n[turn 0] b:\nxxxxx\n[...]\nyyyyy\n\n[next] a:"
    assert joint_history("q", [Utterance("a", 0, "x"), Utterance("b", 0, "y")], a) != joint_history(
        "q", [Utterance("a", 0, "y"), Utterance("b", 0, "x")], a
    )
    assert joint_history("q", history, a) != joint_history("q", history, b)
    with pytest.raises(ValueError, match="max_chars: 1"):
        joint_history("q", history, a, max_chars=1)


def test_joint_history_holds_what_envs_showed_once_a_turn():
    history = [
        Utterance("a", 0, "left", shown="a door"),
        Utterance("b", 0, "right", shown="a door"),
        Utterance("a", 1, "up", "a wall"),
    ]
    text = joint_history("Out?", history, Utterance("b", 1, "", shown="x" * 9), max_chars=6)
    assert text == (
        "Out?\n\n[turn 0] shown to a:\na door\n\n[turn 0] a:\nleft\n\n[turn 0] b:\nright"
        "\n\n[turn 1] shown to a:\na wall\n\n[turn 1] a:\nup\n\n[turn 1] shown to b:\nxxx\n[...]\nxxx\n\n[next] b:"
    )
