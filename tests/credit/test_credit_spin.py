"""Preference losses in closed form: their slopes, the policies that they lead to, and which calls form a pair."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import credit_batch, estimate
from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.spin import form_pairs, loss_and_slope, spin
from recipe.dag.train.selection import keep_informative
from recipe.dag.types.row import Candidate
from tests.rows import merge_rows, with_calls

FORMULAS = {
    "sigmoid": lambda h, beta: -0.9 * logsigmoid(beta * h) - 0.1 * logsigmoid(-beta * h),
    "hinge": lambda h, beta: torch.relu(1 - beta * h),
    "ipo": lambda h, beta: (h - 1 / (2 * beta)) ** 2,
}
KEYS = make_algorithm("spin").grouping


def pairs_of(rows, **options) -> list[tuple[int, int, float]]:
    """(chosen, rejected, weight) by the rows' places."""
    algorithm = make_algorithm("spin", **options)
    pairs = algorithm._pairs(credit_batch(algorithm, rows))  # pyright: ignore[reportAttributeAccessIssue]
    columns = (pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.weight.tolist())
    return sorted(zip(*columns, strict=True))


def group(make_row, returns, **facts) -> list:
    return [make_row(value, episode=index, **facts) for index, value in enumerate(returns)]


@pytest.mark.parametrize("loss", FORMULAS)
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_the_weight_of_a_pair_is_the_slope_of_its_loss(loss, beta):
    h = torch.tensor([-3.0, -0.2, 0.0, 0.4, 7.0], dtype=torch.float64, requires_grad=True)
    expected = FORMULAS[loss](h, beta)
    (gradient,) = torch.autograd.grad(expected.sum(), h)
    value, slope = loss_and_slope(h.detach(), loss=loss, beta=beta, label_smoothing=0.1 if loss == "sigmoid" else 0.0)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(slope, -gradient)


def test_where_policy_and_reference_agree_the_loss_is_log_2_and_the_weight_half_of_beta():
    value, slope = loss_and_slope(torch.zeros(1), loss="sigmoid", beta=0.3)
    assert (value.item(), slope.item()) == pytest.approx((math.log(2), 0.15))


@pytest.mark.parametrize("h", [-1e4, 1e4])
def test_distant_pairs_have_finite_losses(h):
    value, slope = loss_and_slope(torch.tensor([h]), loss="sigmoid", beta=0.1)
    assert value.isfinite() and slope.item() == pytest.approx(0.1 if h < 0 else 0.0)


def descend(advantages_of, start: float, *, rate: float, steps: int) -> float:
    """Return the logit of the first of two answers after `steps` of the policy gradient with these advantages of
    (probability, log-ratios of the two answers to the policy at `start`)."""
    logit = start
    for _ in range(steps):
        p, q = 1 / (1 + math.exp(-logit)), 1 / (1 + math.exp(-start))
        first, second = advantages_of(p, (math.log(p / q), math.log((1 - p) / (1 - q))))
        logit += rate * (first * (1 - p) - second * p)
    return logit


def advantages_at(make_row, ratios, **options) -> tuple[float, float]:
    """The advantages of an answer that earned 1 and one that earned 0, of one token each, at these log-ratios."""
    rows = group(make_row, [1.0, 0.0], mask=(1,))
    found, _ = estimate(make_algorithm("spin", **options), rows, log_ratios=[torch.tensor([r]) for r in ratios])
    return found[0].item(), found[1].item()


def test_a_preference_leads_to_dpos_policy(make_row):
    """Two answers, the first preferred at rate p: the optimum is the reference's logit plus logit(p) / beta."""
    beta, p, start = 0.5, 0.7, 0.2

    def advantages(_, ratios):
        wins, loses = (
            advantages_at(make_row, order, beta=beta, label_smoothing=0.0) for order in (ratios, ratios[::-1])
        )
        return p * wins[0] + (1 - p) * loses[1], p * wins[1] + (1 - p) * loses[0]

    logit = descend(advantages, start, rate=2.0, steps=80)
    assert logit == pytest.approx(start + math.log(p / (1 - p)) / beta, abs=1e-4) == pytest.approx(1.894596, abs=1e-4)


@pytest.mark.parametrize(
    ("beta", "iterations"),
    [(1.0, [0.8]), (2.0, [0.566970, 0.695910, 0.751587, 0.776727, 0.788598])],
)
def test_iterations_of_self_play_reach_the_data(make_row, beta, iterations):
    """A Bernoulli policy against data of rate 0.8: each iteration moves the logit by 1 / beta of the distance
    (SPIN, theorem 5.4 in two answers)."""
    data, p = 0.8, 0.3
    for expected in iterations:
        q = p  # the opponent is the policy of the last iteration

        def advantages(_, ratios, q=q):
            wins, loses = (advantages_at(make_row, order, beta=beta) for order in (ratios, ratios[::-1]))
            first = data * (1 - q) * wins[0] + (1 - data) * q * loses[1]
            second = data * (1 - q) * wins[1] + (1 - data) * q * loses[0]
            return first, second

        logit = descend(advantages, math.log(p / (1 - p)), rate=4.0 / beta, steps=60)
        p = 1 / (1 + math.exp(-logit))
        assert p == pytest.approx(expected, abs=1e-4)


def test_best_and_worst_of_a_group_are_a_pair(make_row):
    assert pairs_of(group(make_row, [1.0, 0.0, 0.0, 1.0])) == [(0, 1, 1.0)]
    assert pairs_of(group(make_row, [0.2, 0.9, 0.1])) == [(1, 2, 1.0)]


def test_all_pairs_of_a_group_count_as_much_as_one(make_row):
    rows = [*group(make_row, [1.0, 0.0, 0.0, 1.0]), *group(make_row, [0.0, 1.0], uid="v")]
    quarter = [(chosen, rejected, 0.25) for chosen in (0, 3) for rejected in (1, 2)]
    assert pairs_of(rows, pairs="all") == sorted([*quarter, (5, 4, 1.0)])


@pytest.mark.parametrize("pairs", ["best_worst", "all"])
@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [2]},  # verl's recipe pairs rows of different problems
        {"uid": "v"},
        {"agent": "other"},
        {"turn": 1},
        {"learns": False},  # such as a call that was cut off, with `overlong: {mask: true}`
        {"unscored": True},
        {"mask": (0, 0, 0, 0)},
    ],
    ids=str,
)
def test_calls_that_cannot_be_compared_are_in_no_pair(make_row, pairs, change):
    rows = group(make_row, [0.5, 0.0])
    stranger = make_row(1.0, episode=2, **change)
    assert pairs_of([*rows, stranger], pairs=pairs) == pairs_of(rows, pairs=pairs) == [(0, 1, 1.0)]


@pytest.mark.parametrize("pairs", ["best_worst", "all"])
def test_equal_and_nearly_equal_returns_are_in_no_pair(make_row, pairs):
    assert pairs_of(group(make_row, [1.0, 1.0, 1.0]), pairs=pairs) == []
    assert pairs_of(group(make_row, [0.1 + 0.2, 0.3]), pairs=pairs) == [], "a rounding error"
    assert pairs_of(group(make_row, [0.3, 0.5]), pairs=pairs, margin=0.2) == []
    assert pairs_of(group(make_row, [0.3, 0.6]), pairs=pairs, margin=0.2) == [(1, 0, 1.0)]


@pytest.mark.parametrize("options", [{}, {"pairs": "all"}, {"loss": "sppo"}, {"sft_coef": 0.5}], ids=str)
def test_the_order_of_the_rows_and_calls_without_a_pair_change_nothing(make_row, options):
    """Balancing of batches reorders rows, which breaks pairs of neighbours in verl's recipe."""
    rng = random.Random(3)
    lone = make_row(1.0, uid="alone")
    rows = [
        make_row(rng.choice([0.0, 0.5, 1.0]), uid=f"u{uid}", episode=index, mask=(1,) * rng.randrange(1, 5))
        for uid in range(3)
        for index in range(5)
    ]
    ratios = {id(row): torch.randn(len(row.response_mask)) for row in (*rows, lone)}
    algorithm = make_algorithm("spin", **options)

    def credited(some):
        found, _ = estimate(algorithm, some, log_ratios=[ratios[id(row)] for row in some])
        return {id(row): tokens for row, tokens in zip(some, found, strict=True)}

    plain = credited(rows)
    shuffled = [*rows, lone]
    rng.shuffle(shuffled)
    moved = credited(shuffled)
    for row in rows:
        torch.testing.assert_close(moved[id(row)], plain[id(row)])
    assert not moved[id(lone)].any() and any(tokens.any() for tokens in plain.values())
    informative = keep_informative(shuffled, algorithm)
    kept = credited(informative)
    assert {key for key, tokens in plain.items() if tokens.any()} <= kept.keys()
    for key, tokens in kept.items():
        torch.testing.assert_close(tokens, plain[key])


def test_merged_calls_have_the_advantages_of_their_own_pairs(make_row):
    rows = [
        make_row(reward, episode=episode, turn=turn, mask=(1, 1))
        for episode, rewards in enumerate([(1.0, 0.0), (0.0, 2.0)])
        for turn, reward in enumerate(rewards)
    ]
    ratios = [torch.tensor([0.1 * index, -0.3]) for index in range(4)]
    algorithm = make_algorithm("spin", stat_unit="call", gamma_turn=0.0, group_by=("uid", "turn", "prompt_hash"))
    # merged, the second call's prompt is the first one's text, which is the same here
    later = [replace(row, prompt_ids=[1, 7, 7]) if row.calls[0].turn else row for row in rows]
    separate, _ = estimate(algorithm, later, log_ratios=ratios)
    merged = [merge_rows(rows[:2]), merge_rows(rows[2:])]
    together, _ = estimate(algorithm, merged, log_ratios=[torch.cat(ratios[:2]), torch.cat(ratios[2:])])
    torch.testing.assert_close(torch.cat(list(together)), torch.cat(list(separate)))
    assert torch.cat(list(separate)).abs().min() > 0.04


def test_the_advantages_are_those_of_the_mean_over_groups(make_row):
    """Divided by the calls in the loss, as `seq-mean-token-sum` does, each group counts the same."""
    rows = [*group(make_row, [1.0, 0.0, 0.0]), *group(make_row, [1.0, 0.0], uid="v")]
    batch = CreditBatch.from_rows(rows, prompts=True)
    pairs = form_pairs(batch, batch.rewards.tolist(), group_by=KEYS, pairs="all", margin=0.0)
    advantages = spin(batch, pairs, loss="sigmoid", beta=0.2, label_smoothing=0.0, sft_coef=0.0)
    assert (advantages / 5).tolist() == pytest.approx([0.05, -0.025, -0.025, 0.05, -0.05])


def test_sppo_regresses_each_log_ratio_on_its_win_rate(make_row):
    """A tie is half a win; groups in which all tie are left out."""
    rows = [*group(make_row, [1.0, 0.0, 0.0], mask=(1,)), *group(make_row, [1.0, 1.0], uid="v", mask=(1,))]
    ratios = torch.tensor([0.5, -1.0, 2.0, 0.0, 0.0])
    found, _ = estimate(make_algorithm("spin", loss="sppo", beta=0.5), rows, log_ratios=list(ratios.split(1)))
    targets = [(rate - 0.5) / 0.5 for rate in (1.0, 0.25, 0.25)]
    expected = [2 * (target - ratio) for target, ratio in zip(targets, ratios.tolist()[:3], strict=True)]
    assert torch.cat(list(found)).tolist() == pytest.approx([*expected, 0.0, 0.0])


def test_likelihood_of_the_chosen_answers_is_added_per_token(make_row):
    rows = group(make_row, [1.0, 0.0], mask=(1, 1, 0, 1))
    plain, _ = estimate(make_algorithm("spin"), rows)
    with_sft, _ = estimate(make_algorithm("spin", sft_coef=0.3), rows)
    # the mean over one chosen call of 3 tokens, times 2 calls in the loss
    assert (with_sft[0] - plain[0]).tolist() == pytest.approx([0.2, 0.2, 0.0, 0.2])
    assert torch.equal(with_sft[1], plain[1])


def test_candidates_are_ranked_by_their_scores_and_not_by_what_the_episode_earns(make_row):
    scores = (0.2, 0.9, None, 0.4)
    siblings = [
        with_calls(make_row(reward, position=index), candidate=Candidate(index, scores, kept=index == 1))
        for index, reward in enumerate([0.0, -5.0, 0.0, 0.0])
    ]
    plain = make_row(1.0, episode=1)
    assert pairs_of([*siblings, plain]) == [(1, 0, 1.0)]
    kept = keep_informative([*siblings, plain], make_algorithm("spin"))
    assert kept == siblings[:2]


def test_the_data_s_text_is_preferred_to_every_sample_of_its_prompt(make_row):
    samples = group(make_row, [1.0, 0.0], mask=(1,))
    gold = replace(make_row(0.0, mask=(1, 1)), episode=-1, given=True)
    stranger = make_row(1.0, prompt=[9], episode=2)
    rows = [*samples, gold, stranger]
    assert pairs_of(rows, opponent="data") == [(2, 0, 0.5), (2, 1, 0.5)]


def test_metrics_describe_pairs_before_the_update(make_row):
    rows = group(make_row, [1.0, 0.0], mask=(1, 1)) + group(make_row, [1.0, 0.0], mask=(1,), uid="v")
    ratios = [torch.tensor(values) for values in ([0.5, 0.5], [0.0, -1.0], [-0.5], [0.5])]
    algorithm = make_algorithm("spin", beta=1.0)
    metrics = algorithm.credit_metrics(credit_batch(algorithm, rows, log_ratios=ratios))
    losses = [math.log(1 + math.exp(-h)) for h in (2.0, -1.0)]
    assert metrics == pytest.approx(
        {
            "spin/loss": sum(losses) / 2,
            "spin/pairs": 2.0,
            "spin/accuracy": 0.5,
            "spin/margin": 0.5,
            "spin/chosen_log_ratio": 0.25,
            "spin/rejected_log_ratio": -0.25,
            "spin/chosen_length": 1.5,
            "spin/rejected_length": 1.5,
        }
    )
    assert algorithm.credit_metrics(credit_batch(algorithm, rows[:1])) == {}
