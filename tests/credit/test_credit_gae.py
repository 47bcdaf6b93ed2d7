from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.gae import scan
from recipe.dag.credit.whiten import standardize, standardize_per_policy
from tests.credit.with_defaults import gae

MASKS = [(1, 1, 0, 1), (1,), (0, 1, 1, 1, 0), (0, 0), ()]


def reference(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE as the paper writes it, for one chain: the sum over k of (gamma lam)^k delta_{t+k}."""
    ahead = [*values, 0.0][1:]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, ahead, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))  # quadratic, and plain to see
        for t in range(len(deltas))
    ]


def of(rows, values, *, whiten: bool = False, **config):
    return gae(CreditBatch.from_rows(rows, values=values), whiten=whiten, **config)


def some_values(rows, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(len(row.response_mask), generator=draw) for row in rows]


@given(
    chains=st.lists(
        st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.booleans()), max_size=6), min_size=1, max_size=5
    ),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_the_scan_is_the_papers_sum_for_every_chain(chains, gamma, lam):
    rewards, values, unknown = ([x[i] for chain in chains for x in chain] for i in (0, 1, 2))
    found = scan(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor([len(chain) for chain in chains]),
        torch.tensor(unknown, dtype=torch.bool).nonzero().squeeze(1),
        gamma=gamma,
        lam=lam,
    )
    expected: list[float] = []
    for chain in chains:
        following = [value for _, value, _ in chain[1:]] + [0.0]
        # a reward that is unknown is the one that the values expect
        known = [v - gamma * after if hidden else r for (r, v, hidden), after in zip(chain, following, strict=False)]
        expected += reference(known, [value for _, value, _ in chain], gamma, lam)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_without_discount_and_values_the_return_is_the_reward_to_go(make_row, merge):
    row = merge([make_row(1.0, mask=(1, 1)), make_row(2.0, turn=1, mask=(0, 1)), make_row(4.0, turn=2, mask=(1, 0))])
    _, returns = of([row], [torch.zeros(6)])
    assert returns[0].tolist() == [7, 7, 0, 6, 4, 0]


def test_holes_in_the_mask_are_skipped(make_row):
    values = torch.tensor([0.3, 9.0, 0.5, 9.0])
    advantages, returns = of([make_row(1.0, mask=(1, 0, 1, 0))], [values], gamma=0.9, lam=0.8)
    first, last = reference([0.0, 1.0], [0.3, 0.5], 0.9, 0.8)
    assert advantages[0].tolist() == pytest.approx([first, 0, last, 0])
    assert returns[0].tolist() == pytest.approx([first + 0.3, 0, last + 0.5, 0])


def test_matches_verls_gae(make_row):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    masks, rewards = [(1, 1, 0, 1), (1, 1, 1, 0), (0, 1, 0, 0)], [1.0, -0.5, 0.25]
    rows = [make_row(r, uid=f"u{i}", mask=m) for i, (r, m) in enumerate(zip(rewards, masks, strict=True))]
    values, scores = some_values(rows), torch.zeros(3, 4)
    for row, (mask, reward) in enumerate(zip(masks, rewards, strict=True)):
        scores[row, max(t for t in range(4) if mask[t])] = reward
    _, expected = core_algos.compute_gae_advantage_return(scores, torch.stack(values), torch.tensor(masks), 0.9, 0.7)
    _, returns = of(rows, values, gamma=0.9, lam=0.7)
    mask = torch.tensor(masks).bool()
    torch.testing.assert_close(torch.stack(returns)[mask], expected[mask])


def test_an_integer_mask_truncates_nothing(make_row):
    advantages, returns = of([make_row(0.25, mask=(1, 1))], [torch.tensor([0.5, 0.125])])
    assert advantages[0].tolist() == [-0.25, 0.125] and returns[0].tolist() == [0.25, 0.25]
    assert advantages[0].dtype == returns[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ([(1, 1), (0, 0), (1,)], [0, 3, 0, 0, 4]),  # to the token before it
        ([(0,), (1, 1), (1,)], [0, 1, 2, 4]),  # to the next one, where none is before it
        ([(1,), (1,), ()], [1, 6]),
        ([(), (), (1,)], [7]),
        ([(), (0,), ()], [0]),
    ],
)
def test_what_a_call_without_sampled_tokens_earned_goes_to_its_neighbour(make_row, merge, masks, expected):
    row = merge([make_row(r, turn=t, mask=m) for t, (r, m) in enumerate(zip((1.0, 2.0, 4.0), masks, strict=True))])
    _, returns = of([row], [torch.zeros(len(row.response_mask))], lam=0.0)  # so that a return is the token's reward
    assert returns[0].tolist() == expected


def test_penalties_stand_on_their_tokens(make_row):
    row = make_row(1.0, mask=(1, 0, 1))
    batch = CreditBatch.from_rows([row], values=[torch.zeros(3)], penalties=[torch.tensor([-0.25, -9.0, -0.5])])
    _, returns = gae(batch, whiten=False)
    assert returns[0].tolist() == [0.25, 0, 0.5]


def test_a_row_is_a_chain_of_its_own(make_row):
    rows = [make_row(1.0, episode=e, mask=(1, 1)) for e in range(2)]
    together, _ = of(rows, some_values(rows))
    for i in range(2):
        alone, _ = of(rows[i : i + 1], some_values(rows)[i : i + 1])
        assert torch.equal(alone[0], together[i])


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=6))
def test_counting_a_value_is_repeating_it_and_policies_are_apart(values):
    given, counts, members = (torch.tensor(column) for column in zip(*values, strict=True))
    given, members = given.double(), members.long()
    repeated = standardize_per_policy(given.repeat_interleave(counts), members.repeat_interleave(counts))
    found = standardize_per_policy(given, members, counts).repeat_interleave(counts)
    torch.testing.assert_close(found, repeated, atol=1e-6, rtol=1e-6)
    mine = members.repeat_interleave(counts) == 0
    torch.testing.assert_close(found[mine], standardize(given.repeat_interleave(counts)[mine]), atol=1e-6, rtol=1e-6)


def test_returns_are_not_whitened(make_row):
    rows = [make_row(float(i), uid=f"u{i}", mask=(1, 1)) for i in range(3)]
    plain, white = (of(rows, some_values(rows), whiten=whiten) for whiten in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain[1], white[1], strict=True))
    assert torch.cat(white[0]).mean().item() == pytest.approx(0, abs=1e-6)


def test_penalties_are_subtracted_from_a_calls_reward_by_estimators_of_calls(make_row):
    rows = [make_row(r, episode=i, mask=(1, 0, 1)) for i, r in enumerate((1.0, 1.0))]
    penalties = [torch.tensor([-0.25, -9.0, -0.25]), torch.zeros(3)]
    algorithm = make_algorithm(scale="none")
    advantages, returns = estimate(algorithm, rows, penalties=penalties)
    assert [t.tolist() for t in advantages] == [[-0.25, 0, -0.25], [0.25, 0, 0.25]]
    assert returns[0].tolist() == [0.5, 0, 0.5]


def test_reinforce_pp_pays_the_penalties_from_a_token_on(make_row):
    penalties = [torch.tensor([-0.5, -9.0, -0.25])]
    _, returns = estimate(
        make_algorithm("reinforce_pp", gamma=0.5), [make_row(1.0, mask=(1, 0, 1))], penalties=penalties
    )
    assert returns[0].tolist() == [-0.5 + 0.5 * 0.75, 0, 0.75]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.zeros(3)], "3 values for a response of 2 tokens"),
        ([torch.tensor([float("nan"), 0.0])], "a value is not finite"),
    ],
)
def test_bad_values_are_refused_with_their_row(make_row, values, message):
    with pytest.raises(ValueError, match=f"row of uid u, episode 0, agent solver: {message}"):
        of([make_row(1.0, mask=(1, 1))], values)


def test_gae_without_values_and_with_impossible_discounts_is_refused(make_row):
    rows = [make_row(1.0, mask=(1, 1))]
    with pytest.raises(ValueError, match="gae needs a critic's values"):
        estimate(make_algorithm("gae"), rows)
    for name in ("gamma", "lam"):
        with pytest.raises(ValueError, match=f"{name}: 1.5"):
            of(rows, some_values(rows), **{name: 1.5})


def test_no_rows_are_no_work():
    assert of([], []) == ([], [])
