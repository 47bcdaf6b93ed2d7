"""Invariances of every estimator that a workflow may name: to the order of the rows, to padding and, where rewards are
compared, to a shift and to the scale of all of them."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.dag.algorithms.catalogue import ESTIMATORS, SELECTABLE, make_algorithm
from recipe.dag.algorithms.estimate import estimate

COMPARED = [name for name in SELECTABLE if not ESTIMATORS[name].needs_values and name != "reinforce"]
"""Their advantages are distances between rewards."""
SCALED = [name for name in COMPARED if getattr(make_algorithm(name), "scale", "std") == "std"]
SEEDS = st.integers(0, 10_000)
SHIFTS = st.integers(-20, 20).map(lambda k: k / 4)


def rows_of(make_row, seed, shift=0.0, factor=1.0, padding=0):
    """Two samples, three episodes each, two agents that speak twice; each call's mask ends in a sampled token. `shift`:
    of the outcome, on the last call of each agent."""
    rng, rows = random.Random(seed), []
    for index in range(6):
        for position in range(4):
            mask = tuple(rng.choices([0, 1], k=rng.randrange(3))) + (1,) + (0,) * padding
            reward = factor * rng.randrange(-8, 9) / 8 + shift * (position > 1)
            agent = "ab"[position % 2]
            row = make_row(
                reward, uid=f"u{index // 3}", episode=index % 3, agent=agent, node=agent, turn=position // 2,
                mask=mask, position=position, parts={"reward": reward},
            )  # fmt: skip
            rows.append(row)
    return rows


def advantages(name, rows):
    """Each row's, over the tokens that it sampled; values are a function of the row's place in its episode."""
    values = None
    if ESTIMATORS[name].needs_values:
        places = [(row.episode + 2 * row.calls[0].position) / 7 for row in rows]
        values = [torch.arange(len(row.response_mask)) / 5 + place for row, place in zip(rows, places, strict=True)]
    found, _ = estimate(make_algorithm(name), rows, values=values)
    return [tokens[torch.tensor(row.response_mask) == 1] for tokens, row in zip(found, rows, strict=True)]


@pytest.mark.parametrize("name", SELECTABLE)
@given(seed=SEEDS, padding=st.integers(0, 5))
@settings(max_examples=15)
def test_neither_the_order_of_the_rows_nor_padding_matters(make_row, name, seed, padding):
    rows = rows_of(make_row, seed)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    padded = rows_of(make_row, seed, padding=padding)
    plain, moved = advantages(name, rows), advantages(name, [padded[index] for index in order])
    for index, found in zip(order, moved, strict=True):
        torch.testing.assert_close(found, plain[index], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", COMPARED)
@given(seed=SEEDS, shift=SHIFTS)
@settings(max_examples=15)
def test_a_shift_of_all_outcomes_does_not_matter(make_row, name, seed, shift):
    """A discounted return (magrpo) is shifted by less in earlier turns, by as much for each that is compared."""
    plain, moved = (torch.cat(advantages(name, rows_of(make_row, seed, s))) for s in (0.0, shift))
    torch.testing.assert_close(moved, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", COMPARED)
@given(seed=SEEDS, factor=st.sampled_from([0.5, 3.0, 40.0]))
@settings(max_examples=10)
def test_scale_matters_only_where_nothing_divides_by_it(make_row, name, seed, factor):
    plain, scaled = (torch.cat(advantages(name, rows_of(make_row, seed, factor=f))) for f in (1.0, factor))
    expected = plain if name in SCALED else factor * plain
    torch.testing.assert_close(scaled, expected, atol=1e-3, rtol=1e-3)


def test_the_kl_in_the_reward_of_a_policy_of_two_tokens_is_its_closed_form(make_row):
    """The mean, over what the policy samples, of reward less penalty is the reward less the weight times KL(p, q)."""
    p, q, weight = (0.8, 0.2), (0.3, 0.7), 0.25
    said = [token for token, probability in enumerate(p) for _ in range(round(10 * probability))]
    rows = [make_row(1.0, episode=index, mask=(1,)) for index in range(len(said))]
    penalties = [torch.tensor([weight * (math.log(q[token]) - math.log(p[token]))]) for token in said]
    found, _ = estimate(make_algorithm("reinforce"), rows, penalties=penalties)
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert torch.cat(found).mean().item() == pytest.approx(1.0 - weight * kl)
