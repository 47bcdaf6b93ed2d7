"""The server's log-probs against the trainer's, in a training step."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.dag.train import kernels
from recipe.dag.types.row import Row
from tests.rows import build_row
from tests.train.steps import run_step

SERVER, TRAINER = -1.0, -1.0 + math.log(1.5)


def row(episode: int, reward: float) -> Row:
    server = [SERVER, 0.0, SERVER]
    return build_row(reward, episode=episode, agent="a0", node="n0", mask=(1, 0, 1), log_probs=server)


@pytest.fixture
def update(monkeypatch, workflow_of):
    """Runs a step with this `algorithm`; returns (what the update was given, the step's metrics)."""

    def run(algorithm: str) -> tuple[dict[str, list[torch.Tensor]], dict[str, float]]:
        given = {}

        def old_log_probs(policy, batch):
            batch.columns["old_log_probs"] = [torch.full((3,), TRAINER) for _ in batch.rows]
            batch.columns["entropy"] = [torch.ones(3) for _ in batch.rows]

        monkeypatch.setattr(kernels, "old_log_probs", old_log_probs)
        monkeypatch.setattr(kernels, "update_actor", lambda p, batch, a, *, seed: given.update(batch.columns))
        monkeypatch.setattr(kernels, "prepare", lambda *args: None)
        step = run_step(workflow_of(1, algorithm=algorithm), [row(0, 1.0), row(1, 0.0)], "main")
        return given, step.metrics()

    return run


@pytest.mark.parametrize(
    ("options", "weight", "capped"),
    [
        ("{}", 1.5, 0.0),
        ("{cap: 1.25}", 1.25, 1.0),
        ("{cap: 1.25, mode: mask}", 0.0, 1.0),
        ("{level: sequence}", 2.0, 1.0),
        ("{level: sequence, cap: 3}", 2.25, 0.0),
        ("{level: geometric}", 1.5, 0.0),
        ("{level: geometric, cap: 1.1, veto: 0.0001}", 1.1, 1.0),
    ],
)
@pytest.mark.parametrize("more", ["", ", policy_loss: gspo", ", policy_loss: cpgd", ", uncertainty: {}"])
def test_the_update_gets_a_weight_per_token_whatever_the_loss(update, options, weight, capped, more):
    given, metrics = update(f"estimator: grpo, importance: {options}{more}")
    assert [one.tolist() for one in given["rollout_is_weights"]] == [pytest.approx([weight, 0.0, weight])] * 2
    assert metrics["policy/main/importance/mean"] == pytest.approx(weight)
    assert metrics["policy/main/importance/capped"] == capped
    assert metrics["policy/main/logprob_diff/mean"] == pytest.approx(math.log(1.5))


def test_advantages_do_not_depend_on_the_weights(update):
    plain, metrics = update("estimator: grpo")
    weighed, _ = update("estimator: grpo, importance: {}")
    assert "rollout_is_weights" not in plain and not any("importance" in key for key in metrics)
    assert all(map(torch.equal, plain["advantages"], weighed["advantages"]))
