"""Rows on their way to the trainer: their selection, their tensors, and metrics of their tokens."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.train.kernels import to_tensordict
from recipe.dag.train.metrics import mismatch, token_metrics
from recipe.dag.train.packing import PAD
from recipe.dag.train.selection import keep_informative, split_by_policy
from tests.train.rows import row


def test_rows_go_to_their_policies_in_order_and_frozen_ones_are_left_out(two_policies):
    rows = [row(1, policy="b"), row(2, policy="fixed"), row(3, policy="a"), row(4, policy="b")]
    split = split_by_policy(rows, two_policies)
    assert {name: [r.calls[0].reward for r in mine] for name, mine in split.items()} == {"a": [3], "b": [1, 4]}


def test_rows_without_anything_to_compare_are_left_out_where_asked():
    rewards = [(1, "same", 0), (0, "mixed", 0), (1, "same", 1), (1, "mixed", 1)]
    rows = [row(reward, uid=uid, episode=episode) for reward, uid, episode in rewards]
    assert keep_informative(rows, make_algorithm()) == rows
    assert [r.uid for r in keep_informative(rows, make_algorithm(drop_zero_variance=True))] == ["mixed", "mixed"]
    assert keep_informative([], make_algorithm(drop_zero_variance=True)) == []


def test_a_tensordict_holds_the_rows_in_layout_order_and_padding_has_no_mask():
    data = to_tensordict([row(mask=(1, 1)), row(mask=(1, 0, 1, 1))], [PAD, 1, 0], pad_token_id=9)
    assert [t.tolist() for t in data["input_ids"].unbind()] == [[9, 9], [3, 4, 5, 6, 7, 8], [3, 4, 5, 6]]
    assert [t.tolist() for t in data["response_mask"].unbind()] == [[0], [1, 0, 1, 1], [1, 1]]
    assert [t.tolist() for t in data["position_ids"].unbind()] == [[0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert data["temperature"] == 1.0


def test_rows_of_one_length_stay_jagged():
    data = to_tensordict([row(), row()], [0, 1], pad_token_id=0)
    assert all(data[name].layout == torch.jagged for name in ("input_ids", "response_mask"))


def test_a_greedy_row_is_trained_at_temperature_one():
    data = to_tensordict([row(temperature=0.0), row(temperature=0.5)], [1, PAD, 0], pad_token_id=0)
    assert data["temperature"].tolist() == [0.5, 1.0, 1.0]


def test_mismatch_of_equal_and_shifted_log_probs():
    server = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    assert mismatch(server, server) == {
        "logprob_diff/mean": 0,
        "logprob_diff/max": 0,
        "server_kl": 0,
        "logprob_pearson": pytest.approx(1),
    }
    found = mismatch(server + torch.tensor([0.0, 0.3, 0.0]), server)
    assert found["logprob_diff/mean"] == pytest.approx(0.1) and found["logprob_diff/max"] == pytest.approx(0.3)
    assert found["logprob_pearson"] < 1
    assert found["server_kl"] == pytest.approx((math.exp(0.3) - 1.3) / 3)


def test_the_kl_between_server_and_trainer_is_that_of_their_distributions():
    """Over all outcomes, weighted by the server's probabilities, the estimate is the KL itself."""
    server, trainer = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]))
    estimates = [mismatch(trainer.log()[[i, i]], server.log()[[i, i]])["server_kl"] for i in range(3)]
    exact = (server * (server / trainer).log()).sum().item()
    assert sum(p * k for p, k in zip(server.tolist(), estimates, strict=True)) == pytest.approx(exact)


def test_mismatch_has_no_correlation_where_nothing_varies():
    same = torch.full((3,), -1.0, dtype=torch.float64)
    assert set(mismatch(same, same)) == {"logprob_diff/mean", "logprob_diff/max", "server_kl"}


def test_token_metrics_look_at_sampled_tokens_only():
    rows = [row(mask=(1, 0, 1)), row(mask=(1, 1))]
    nan = math.nan
    columns = {
        "old_log_probs": [torch.tensor([-1.5, nan, -3.0]), torch.tensor([-1.0, -2.0])],
        "ref_log_prob": [torch.tensor([-1.5, nan, -3.0]), torch.tensor([-1.0, -2.0])],
        "entropy": [torch.tensor([1.0, nan, 3.0]), torch.tensor([2.0, 2.0])],
        "advantages": [torch.tensor([0.5, nan, 0.5]), torch.tensor([-1.0, -1.0])],
    }
    metrics = token_metrics(rows, columns)
    expected = {
        "rows": 2,
        "trained_tokens": 4,
        "total_tokens": 9,
        "entropy": 2,
        "advantage/mean": -0.25,
        "advantage/max": 1,
    }
    assert expected.items() <= metrics.items()
    assert metrics["logprob_diff/max"] == pytest.approx(0.5) and metrics["logprob_diff/mean"] == pytest.approx(0.125)
    assert metrics["reference_kl"] == 0


def test_log_probs_taken_over_from_the_server_are_not_compared_with_themselves():
    metrics = token_metrics([row()], {"old_log_probs": [torch.tensor([-1.0, 0.0, -3.0])]})
    assert not any(name.startswith("logprob") for name in metrics)
