"""What a step teaches each agent: worked by hand."""

from __future__ import annotations

import pytest
import torch

from recipe.dag.credit.agent_share import lessons
from tests.rows import build_row, merge_rows

ROWS = [
    build_row(agent="plan", uid="a", mask=(1, 1)),
    build_row(agent="plan", uid="b", mask=(1, 0)),
    build_row(agent="check", uid="a", mask=(1,), position=1),
    build_row(agent="check", uid="a", mask=(1, 1, 1), learns=False),
]
ADVANTAGES = [torch.tensor(values) for values in ([1.0, -2.0], [0.0, 5.0], [0.5], [9.0, 9.0, 9.0])]


def test_masked_tokens_and_calls_outside_the_loss_teach_nothing():
    taught = lessons(ROWS, ADVANTAGES, "token-mean")
    assert taught == {
        "plan": {"grad_mass": 3 / 3.5, "advantage_size": 1.0, "silent_groups": 0.5},
        "check": {"grad_mass": 0.5 / 3.5, "advantage_size": 0.5, "silent_groups": 0.0},
    }


def test_a_mean_over_rows_weighs_a_token_of_a_long_row_less():
    taught = lessons(ROWS, ADVANTAGES, "seq-mean-token-mean")
    assert taught["plan"]["grad_mass"] == pytest.approx(1.5 / 2.0)


def test_calls_of_one_row_are_counted_for_their_own_agents():
    merged = [merge_rows([ROWS[0], ROWS[2]])]
    taught = lessons(merged, [torch.tensor([1.0, -2.0, 0.5])], "token-mean")
    assert (taught["plan"]["grad_mass"], taught["check"]["grad_mass"]) == (3 / 3.5, 0.5 / 3.5)


def test_without_advantages_there_is_no_mass_and_all_groups_are_silent():
    taught = lessons(ROWS[:3], [torch.zeros(2), torch.zeros(2), torch.zeros(1)], "token-mean")
    assert taught["check"] == {"advantage_size": 0.0, "silent_groups": 1.0}
    assert lessons([], [], "token-mean") == {}
