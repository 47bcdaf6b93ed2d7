from __future__ import annotations

import dataclasses

import pytest
import torch

from recipe.dag.credit.batch import CreditBatch


def test_calls_tile_rows_and_rows_lie_end_to_end(make_row, merge):
    rows = [merge([make_row(1, turn=0, mask=(1, 1)), make_row(2, turn=1, mask=(0, 1, 1))]), make_row(3, mask=(1,))]
    batch = CreditBatch.from_rows(rows)
    assert batch.row_of_call == (0, 0, 1)
    assert batch.call_lengths.tolist() == [2, 3, 1]
    assert batch.row_lengths == (5, 1)
    assert batch.turn == (0, 1, 0)
    assert batch.rewards.dtype == torch.float64 and batch.rewards.tolist() == [1.0, 2.0, 3.0]
    tokens = batch.broadcast_to_rows(batch.rewards)
    assert [row.tolist() for row in tokens] == [[1, 1, 0, 2, 2], [3]]
    assert all(row.dtype == torch.float32 for row in tokens)


def test_rows_without_response_tokens_keep_their_place(make_row):
    batch = CreditBatch.from_rows([make_row(1, mask=()), make_row(2, mask=(1,)), make_row(3, mask=())])
    assert [row.tolist() for row in batch.broadcast_to_rows(batch.rewards)] == [[], [2], []]


def test_no_rows():
    batch = CreditBatch.from_rows([])
    assert batch.broadcast_to_rows(batch.rewards) == []


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_reward_that_is_not_finite_is_refused_by_name(make_row, reward):
    with pytest.raises(ValueError, match="uid q7, episode 3, agent coder.*not finite"):
        CreditBatch.from_rows([make_row(1), make_row(reward, uid="q7", episode=3, agent="coder")])


@pytest.mark.parametrize("ends", [(2, 3), (3, 2, 4), (-1, 4), (2, 5), ()])
def test_calls_that_do_not_tile_their_row_are_refused(make_row, ends):
    (call,) = make_row(1).calls
    row = dataclasses.replace(make_row(1), calls=tuple(dataclasses.replace(call, end=end) for end in ends))
    with pytest.raises(ValueError, match="uid u, episode 0.*tile"):
        CreditBatch.from_rows([row])


def test_rows_of_two_policies_are_refused(make_row):
    with pytest.raises(ValueError, match="a, b"):
        CreditBatch.from_rows([make_row(1, policy="b"), make_row(1, policy="a")])


def test_values_and_penalties_are_copied_and_masked_and_junk_behind_the_mask_is_ignored(make_row):
    values = [torch.tensor([1.0, 2.0, float("nan"), 4.0], dtype=torch.float64)]
    batch = CreditBatch.from_rows([make_row(1)], values=values, penalties=values)
    assert batch.values.tolist() == batch.penalties.tolist() == [1.0, 2.0, 0.0, 4.0]
    assert batch.valued.all() and batch.rewards.tolist() == [8.0] and batch.outcomes.tolist() == [1.0]
    assert values[0][2].isnan()
    plain = CreditBatch.from_rows([make_row(1)])
    assert plain.values.tolist() == plain.penalties.tolist() == [0.0] * 4 and not plain.valued.any()
