from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from recipe.dag.algorithms.catalogue import SELECTABLE, make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.credit.batch import CreditBatch
from tests.credit.with_defaults import gae, gae_chain, group_relative, reinforce_pp


def rows_of(make_row):
    return [
        make_row(r, episode=i, turn=i % 2, mask=(1, 0, 1), position=0, parts={"right": r})
        for i, r in enumerate([1.0, 0.0, 0.5, 2.0])
    ]


VALUES = [torch.tensor([0.5, 9.0, -0.25]), torch.zeros(3), torch.ones(3), torch.tensor([0.0, 0.0, 0.75])]


def same(one, other):
    return all(torch.equal(torch.cat(a), torch.cat(b)) for a, b in zip(one, other, strict=True))


def test_a_workflows_algorithm_reaches_the_estimator(make_row):
    rows = rows_of(make_row)
    batch = CreditBatch.from_rows(rows)
    options = {"group_by": ("uid", "turn"), "stat_unit": "trajectory", "center": "leave_one_out", "scale": "none"}
    assert same(estimate(make_algorithm(**options), rows), group_relative(batch, **options))
    assert not same(estimate(make_algorithm(**options), rows), group_relative(batch))
    assert same(estimate(make_algorithm("reinforce_pp", gamma=0.5), rows), reinforce_pp(batch, gamma=0.5))
    assert not same(estimate(make_algorithm("reinforce_pp", gamma=0.5), rows), reinforce_pp(batch))
    batch = CreditBatch.from_rows(rows, values=VALUES)
    options = {"gamma": 0.9, "lam": 0.5, "whiten": False}
    for name, estimator in (("gae", gae), ("gae_chain", gae_chain)):
        found = estimate(make_algorithm(name, **options), rows, values=VALUES)
        assert same(found, estimator(batch, **options)) and not same(found, estimator(batch))


PRESETS = {
    "rloo": {"group_by": ("uid", "agent"), "center": "leave_one_out", "scale": "none"},
    "magrpo": {
        "group_by": ("uid", "agent", "node", "turn", "round"),
        "stat_unit": "call",
        "scale": "none",
        "gamma_turn": 0.9,
    },
}


OWN_REWARDS = {"group_by": ("uid", "agent", "turn", "round"), "stat_unit": "call", "gamma_turn": 0.0}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_grpo_with_options(make_row, name):
    rows = rows_of(make_row)
    expected = group_relative(CreditBatch.from_rows(rows), **PRESETS[name])
    assert same(estimate(make_algorithm(name), rows), expected)


@pytest.mark.parametrize("name", PRESETS)
def test_an_option_that_contradicts_the_preset_is_refused(name):
    center = "mean" if name == "rloo" else "leave_one_out"
    with pytest.raises(ValidationError, match=f"center\n +estimator `{name}` always has"):
        make_algorithm(name, center=center)
    assert make_algorithm(name, stat_unit="call", gamma_turn=0.5).gamma_turn == 0.5


def test_prompts_are_hashed_when_a_workflow_groups_by_them(make_row):
    rows = rows_of(make_row)
    rows[3] = dataclasses.replace(rows[3], prompt_ids=[1, 2])
    advantages, _ = estimate(make_algorithm(group_by=("uid", "prompt_hash"), scale="none"), rows)
    assert [round(row[0].item(), 6) for row in advantages] == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "rewards", "expected"),
    [
        # (episode, round): what is discounted over more rounds is not compared with what is over fewer
        ({"estimator": "magrpo"}, [[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]),
        ({"estimator": "magrpo"}, [[0.0, 1.0], [0.0, 0.0]], [[0.45, 0.5], [-0.45, -0.5]]),
        (OWN_REWARDS, [[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]),
        (OWN_REWARDS, [[0.0, 1.0], [2.0, 1.0]], [[-(0.5**0.5), 0.0], [0.5**0.5, 0.0]]),
    ],
)
def test_a_round_is_compared_with_the_same_round(make_row, options, rewards, expected):
    rows = [
        make_row(reward, episode=e, position=k, mask=(1,), round=k, step=k)
        for e, of_episode in enumerate(rewards)
        for k, reward in enumerate(of_episode)
    ]
    algorithm = make_algorithm(**options)
    found, _ = estimate(algorithm, rows)
    assert torch.cat(found).view(2, 2).tolist() == [pytest.approx(row, abs=1e-5) for row in expected]


def test_estimators_change_nothing_in_the_rows(make_row):
    rows = rows_of(make_row)
    for name in SELECTABLE:
        estimate(make_algorithm(name), rows, values=VALUES)
    assert rows == rows_of(make_row)


def test_credit_needs_neither_verl_nor_ray():
    code = "import sys, recipe.dag.algorithms.estimate; print(sorted({'verl', 'ray', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
