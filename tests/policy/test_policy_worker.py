"""The random state of a worker process."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.dag.policy.worker import PolicyWorker


@pytest.fixture(autouse=True)
def kept_random_state():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draws(step: int, *, seed: int = 0, policy: str = "main", rank: int = 0) -> tuple[float, float, float]:
    config = OmegaConf.create({"actor": {"data_loader_seed": seed}, "rollout": {"custom": {"policy": policy}}})
    PolicyWorker.seed_random_state(SimpleNamespace(config=config, rank=rank), step)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_step_draws_the_same_numbers_whatever_was_drawn_before():
    first = draws(7)
    torch.rand(5), np.random.rand(3), random.random()
    assert draws(7) == first


@pytest.mark.parametrize(
    "other", [{"step": 8}, {"step": 7, "seed": 1}, {"step": 7, "policy": "b"}, {"step": 7, "rank": 1}]
)
def test_steps_seeds_policies_and_ranks_draw_different_numbers(other):
    assert not set(draws(7)) & set(draws(**other))


def test_a_worker_is_seeded_before_it_makes_its_models(monkeypatch):
    """Weights that no checkpoint holds, such as a critic's head, come out of this state."""

    def unseeded(self, config, role):
        self.config, self._rank = config, 1

    monkeypatch.setattr(ActorRolloutRefWorker, "__init__", unseeded)
    monkeypatch.setattr("recipe.dag.policy.worker.is_initialized", lambda: True)
    expected = draws(0, seed=5, rank=1)
    config = OmegaConf.create({"actor": {"data_loader_seed": 5}, "rollout": {"custom": {"policy": "main"}}})
    PolicyWorker(config, role="actor_rollout")
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
