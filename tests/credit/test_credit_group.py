from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.credit.batch import CreditBatch
from recipe.dag.train.selection import keep_informative
from tests.credit.with_defaults import group_relative, zero_variance
from tests.rows import with_calls

REWARDS = st.lists(st.integers(-40, 40).map(lambda k: k / 8), min_size=2, max_size=8)


def advantages(rows, **options):
    """Each row's advantage at its first token, and a check that every sampled token has the same."""
    result, _ = group_relative(CreditBatch.from_rows(rows), **options)
    for row, tokens in zip(rows, result, strict=True):
        mask = torch.tensor(row.response_mask)
        assert tokens.shape == mask.shape and tokens.dtype == torch.float32
        assert torch.equal(tokens, tokens[0] * mask)
    return [tokens[0].item() for tokens in result]


def test_published_fixture_per_agent_and_pooled(make_row):
    a = [make_row(r, agent="a", episode=i) for i, r in enumerate([1, 1, 0, 0])]
    b = [make_row(r, agent="b", episode=i) for i, r in enumerate([0.2, 0, 0, 0.1])]
    per_agent = [0.8660, 0.8660, -0.8660, -0.8660, 1.3056, -0.7833, -0.7833, 0.2611]
    pooled = [1.5996, 1.5996, -0.6455, -0.6455, -0.1964, -0.6455, -0.6455, -0.4210]
    assert advantages(a + b) == pytest.approx(per_agent, abs=1e-4)
    assert advantages(a + b, group_by=("uid",)) == pytest.approx(pooled, abs=1e-4)


def test_matches_verls_grpo(make_row):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    rewards, uids = [0.3, 1.0, -0.5, 2.0, 0.25, 0.0], ["p", "p", "p", "q", "q", "q"]
    scores = torch.zeros(6, 4)
    scores[:, 3] = torch.tensor(rewards)
    mask = torch.tensor([[1, 1, 0, 1]] * 6)
    expected, _ = core_algos.compute_grpo_outcome_advantage(scores, mask, uids)
    rows = [make_row(r, uid=u, episode=i) for i, (r, u) in enumerate(zip(rewards, uids, strict=True))]
    result, _ = group_relative(CreditBatch.from_rows(rows))
    torch.testing.assert_close(torch.stack(result), expected)


@pytest.mark.parametrize("center", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("rewards", [[5.0], [0.1] * 3, [0.1 + 0.2, 0.3], [-7.0] * 8])
def test_nothing_to_compare_is_exactly_zero(make_row, rewards, center, scale):
    rows = [make_row(r, episode=i) for i, r in enumerate(rewards)]
    assert advantages(rows, center=center, scale=scale) == [0.0] * len(rows)
    assert zero_variance(CreditBatch.from_rows(rows)) == [True] * len(rows)


@pytest.mark.parametrize("center", ["mean", "leave_one_out"])
def test_a_call_without_sampled_tokens_is_in_no_group(make_row, center):
    rows = [make_row(reward, episode=i) for i, reward in enumerate([1.0, 0.0])]
    silent = make_row(1.0, episode=2, mask=(0, 0))
    assert advantages([*rows, silent], center=center) == [*advantages(rows, center=center), 0.0]


def test_rewards_that_differ_by_a_millionth_are_compared(make_row):
    rows = [make_row(reward, episode=i) for i, reward in enumerate([1.0, 1.000001])]
    assert advantages(rows, scale="none") == pytest.approx([-5e-7, 5e-7], rel=1e-4)


def test_equal_trajectories_of_unequal_parts_are_exactly_zero(make_row):
    parts = [(0.1, 0.2, -0.3), (0.0, 0.0, 0.0)]
    rows = [make_row(r, episode=e, turn=t) for e, rewards in enumerate(parts) for t, r in enumerate(rewards)]
    assert advantages(rows, stat_unit="trajectory") == [0.0] * 6


def test_trajectory_weighs_each_episode_once(make_row):
    # Episode 0 moves three times for 1 in all, episode 1 once for 0.
    rows = [make_row(r, episode=0, turn=t) for t, r in enumerate([0.2, 0.3, 0.5])] + [make_row(0.0, episode=1)]
    assert advantages(rows, scale="none") == pytest.approx([0.5, 0.5, 0.5, -0.5])
    # own rewards: the mean of the episodes' means, 1/3 and 0
    own = [value - 1 / 6 for value in (0.2, 0.3, 0.5, 0.0)]
    assert advantages(rows, stat_unit="call", scale="none") == pytest.approx(own)
    # less the mean of the others', which is that of the other episode
    others = [0.2, 0.3, 0.5, -1 / 3]
    assert advantages(rows, stat_unit="call", scale="none", center="leave_one_out") == pytest.approx(others)


def test_an_outcome_on_the_last_call_belongs_to_all_calls_of_its_agent(make_row):
    """At whichever nodes, turns and rounds it made them; a call without sampled tokens hands its reward on."""
    rows = [
        make_row(0.0, turn=0, node="draft"),
        make_row(0.0, turn=1, node="draft"),
        make_row(0.0, turn=1, node="revise"),
        make_row(1.0, turn=2, mask=()),
    ]
    assert [r.tolist() for r in group_relative(CreditBatch.from_rows(rows))[1]] == [[1, 1, 0, 1]] * 3 + [[]]
    other = make_row(0.0, episode=1)
    found, _ = group_relative(CreditBatch.from_rows([*rows, other]), scale="none")
    assert [tokens[:1].tolist() for tokens in found] == [[0.5]] * 3 + [[]] + [[-0.5]]


def test_trajectories_of_different_samples_stay_apart_without_uid_in_the_group(make_row):
    rows = [make_row(1.0, uid="p", episode=0), make_row(0.0, uid="q", episode=0)]
    assert advantages(rows, group_by=("agent",), stat_unit="trajectory", scale="none") == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize(("field", "places"), [("turn", (0, 1)), ("round", (0, 1)), ("node", "xy")])
def test_calls_are_compared_by_turn_round_or_node(make_row, field, places):
    one, other = ({field: place} for place in places)
    calls = [(0, one, 1), (1, one, 0), (0, other, 5), (1, other, 5)]
    rows = [make_row(r, episode=e, **where) for e, where, r in calls]
    found = advantages(rows, group_by=("uid", "agent", field), stat_unit="call", scale="none")
    assert found == pytest.approx([0.5, -0.5, 0, 0])


@pytest.mark.parametrize("group_by", [("uid", "agent"), ("uid", "agent", "turn"), ("uid", "node")])
@pytest.mark.parametrize("stat_unit", ["call", "trajectory"])
def test_merged_rows_get_what_the_separate_rows_get(make_row, merge, group_by, stat_unit):
    rng = random.Random(0)
    episodes = [
        [
            make_row(rng.random(), episode=e, turn=t, node=f"n{e % 2}", mask=tuple(rng.choices([0, 1], k=t + 2)))
            for t in range(1 + e % 3)
        ]
        for e in range(5)
    ]
    options = {"group_by": group_by, "stat_unit": stat_unit}
    apart, apart_returns = group_relative(CreditBatch.from_rows([row for rows in episodes for row in rows]), **options)
    merged, merged_returns = group_relative(CreditBatch.from_rows([merge(rows) for rows in episodes]), **options)
    assert torch.equal(torch.cat(apart), torch.cat(merged))
    assert torch.equal(torch.cat(apart_returns), torch.cat(merged_returns))


def test_agents_of_one_role_are_compared_with_each_other(make_row):
    rows = [make_row(r, agent=a, node=a) for a, r in (("left", 1.0), ("right", 0.0), ("judge", 5.0))]
    debaters = [*(with_calls(row, role="debater") for row in rows[:2]), rows[2]]
    options = {"group_by": ("uid", "role"), "scale": "none"}
    assert [a[0].item() for a in group_relative(CreditBatch.from_rows(debaters), **options)[0]] == [0.5, -0.5, 0.0]
    assert [a[0].item() for a in group_relative(CreditBatch.from_rows(rows), **options)[0]] == [0.0] * 3


def test_episodes_are_compared_with_those_that_took_the_same_way(make_row):
    ways = ("", "0.0 without check", "", "0.0 without check")
    rewards = (1.0, 0.0, 0.0, 0.0)
    rows = [make_row(r, episode=i, branch=way) for i, (r, way) in enumerate(zip(rewards, ways, strict=True))]
    batch, options = CreditBatch.from_rows(rows), {"group_by": ("uid", "agent", "branch")}
    advantages, _ = group_relative(batch, scale="none", **options)
    assert [a[0].item() for a in advantages] == [0.5, 0.0, -0.5, 0.0]
    assert zero_variance(batch, **options) == [False, True, False, True]
    algorithm = make_algorithm(drop_zero_variance=True, **options)
    assert keep_informative(rows, algorithm) == [rows[0], rows[2]]


def test_returns_are_what_the_call_is_worth(make_row):
    rows = [make_row(r, episode=e, turn=t, mask=(1, 0)) for e, t, r in [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 0.5)]]
    batch = CreditBatch.from_rows(rows)
    assert [r.tolist() for r in group_relative(batch)[1]] == [[3, 0], [3, 0], [0.5, 0]]
    assert [r.tolist() for r in group_relative(batch, stat_unit="call")[1]] == [[1, 0], [2, 0], [0.5, 0]]


def test_the_calls_of_a_merged_row_go_one_by_one_where_their_group_is_flat(make_row, merge):
    rewards = [(1, 5, 2), (1, 6, 2), (1, 6, 3)]
    split = [[make_row(r, episode=e, turn=t) for t, r in enumerate(own)] for e, own in enumerate(rewards)]
    split.append([make_row(4, uid="other")])
    rows = [merge(own) for own in split]
    options = {"group_by": ("uid", "turn"), "stat_unit": "call"}
    assert zero_variance(CreditBatch.from_rows(rows), **options) == [True, False, False] * 3 + [True]
    algorithm = make_algorithm(drop_zero_variance=True, **options)
    kept = keep_informative(rows, algorithm)
    separate = keep_informative([row for own in split for row in own], algorithm)
    assert [[call.reward for call in row.calls] for row in kept] == [[5, 2], [6, 2], [6, 3]] and len(separate) == 6
    assert [row.response_mask for row in kept] == [[0] * 4 + [1, 1, 0, 1] * 2] * 3
    advantages = [group_relative(CreditBatch.from_rows(made), **options)[0] for made in (kept, separate)]
    merged, apart = (torch.cat(made)[torch.cat(made) != 0] for made in advantages)
    assert torch.equal(merged, apart)


@pytest.mark.parametrize(
    "option", [{"center": "median"}, {"scale": "var"}, {"stat_unit": "row"}, {"group_by": ("uid", "policy")}]
)
def test_unknown_options_are_refused(make_row, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        group_relative(CreditBatch.from_rows([make_row(1)]), **option)


@given(rewards=REWARDS, stat_unit=st.sampled_from(["call", "trajectory"]), seed=st.integers(0, 1000))
def test_order_of_the_rows_does_not_matter(make_row, rewards, stat_unit, seed):
    rows = [make_row(r, uid=f"u{i % 2}", episode=i // 2, agent=f"a{i % 3}") for i, r in enumerate(rewards)]
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    straight = advantages(rows, stat_unit=stat_unit, group_by=("uid",))
    shuffled = advantages([rows[i] for i in order], stat_unit=stat_unit, group_by=("uid",))
    assert shuffled == [straight[i] for i in order]


def test_discount_over_an_agents_own_turns_and_rounds(make_row):
    """Two rounds in turn 0, one in turn 1 at two nodes; the other agent and the other episode earn for themselves."""
    mine = [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 4.0)]
    rows = [make_row(r, turn=t, position=i, round=k, step=i) for i, (t, k, r) in enumerate(mine)]
    rows += [make_row(16.0, turn=1, node="else", position=3, step=2)]
    rows += [make_row(8.0, turn=1, agent="other"), make_row(32.0, episode=1)]
    random.Random(2).shuffle(rows)
    _, returns = group_relative(CreditBatch.from_rows(rows), stat_unit="call", gamma_turn=0.5)
    rewards = [row.calls[0].reward for row in rows]
    found = {reward: tokens[0].item() for reward, tokens in zip(rewards, returns, strict=True)}
    assert found == {1.0: 7.0, 2.0: 12.0, 4.0: 20.0, 8.0: 8.0, 16.0: 16.0, 32.0: 32.0}
    _, own = group_relative(CreditBatch.from_rows(rows), stat_unit="call", gamma_turn=0.0)
    assert [tokens[0].item() for tokens in own] == rewards


def test_the_discount_is_over_turns_not_over_the_rows_in_between(make_row):
    rows = [make_row(reward, turn=turn) for turn, reward in ((0, 0.0), (2, 1.0), (5, 8.0))]
    _, returns = group_relative(CreditBatch.from_rows(rows), stat_unit="call", gamma_turn=0.5)
    assert [tokens[0].item() for tokens in returns] == [0.5, 2.0, 8.0]


def test_magrpo_gives_every_agent_the_same_centered_team_return(make_row):
    team = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]
    rows = [
        make_row(r, episode=e, turn=t, agent=agent, node=agent)
        for agent in ("a", "b")
        for e, rewards in enumerate(team)
        for t, r in enumerate(rewards)
    ]
    found = [tokens[0].item() for tokens in estimate(make_algorithm("magrpo"), rows)[0]]
    first, last = [1.0, 0.9, 0.0], [0.0, 1.0, 0.0]
    expected = [v for one, two in zip(first, last, strict=True) for v in (one - 1.9 / 3, two - 1 / 3)]
    assert found == pytest.approx(expected * 2, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma_turn": 1.5, "stat_unit": "call"}, "gamma_turn: 1.5"),
        ({"gamma_turn": 1.0, "stat_unit": "trajectory"}, "needs stat_unit call"),
    ],
)
def test_bad_discounts_over_turns_are_refused(make_row, options, message):
    with pytest.raises(ValueError, match=message):
        group_relative(CreditBatch.from_rows([make_row(1)]), **options)


def test_zero_variance_sees_the_discounted_returns(make_row):
    rows = [make_row(r, episode=e, turn=t) for e, t, r in [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0)]]
    options = {"group_by": ("uid", "turn"), "stat_unit": "call"}
    assert zero_variance(CreditBatch.from_rows(rows), **options) == [True, False, True, False]
    assert zero_variance(CreditBatch.from_rows(rows), **options, gamma_turn=1.0) == [False] * 4


def test_prompts_are_compared_where_they_were_hashed(make_row):
    rows = [make_row(1.0), make_row(0.0, episode=1, prompt=[1, 3])]
    batch = CreditBatch.from_rows(rows, prompts=True)
    assert group_relative(batch, scale="none")[0][0].any()
    assert not torch.cat(group_relative(batch, scale="none", group_by=("uid", "prompt_hash"))[0]).any()
    with pytest.raises(ValueError, match="prompts were not hashed"):
        group_relative(CreditBatch.from_rows(rows), group_by=("prompt_hash",))


def test_the_prompt_of_a_merged_call_is_all_that_stood_before_it(make_row, merge):
    first = make_row(1, mask=(1, 1), prompt=[1, 2], response=[3, 4])
    merged = merge([first, make_row(1, mask=(0, 1), response=[5, 6])])
    second = make_row(1, mask=(1,), prompt=[1, 2, 3, 4, 5], response=[6])
    apart, one = (CreditBatch.from_rows(rows, prompts=True).prompt_hash for rows in ([first, second], [merged]))
    assert apart == one and apart[0] != apart[1]


@given(rewards=REWARDS)
def test_leave_one_out_is_n_over_n_minus_one_times_the_centered_reward(make_row, rewards):
    rows = [make_row(r, episode=i) for i, r in enumerate(rewards)]
    factor = len(rows) / (len(rows) - 1)
    centered = advantages(rows, scale="none")
    expected = [factor * value for value in centered]
    assert advantages(rows, center="leave_one_out", scale="none") == pytest.approx(expected, abs=1e-5)
