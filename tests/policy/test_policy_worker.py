"""A worker process: its random state, and the time-outs of its process groups."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.dag.policy.worker import PolicyWorker
from tests.policy.worker_timeouts import timeouts_of_process_groups


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
    settings = {"actor": {"data_loader_seed": 5}, "rollout": {"custom": {"policy": "main"}}, "nccl_timeout": 600}
    config = OmegaConf.create(settings)
    PolicyWorker(config, role="actor_rollout")
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected


def test_every_process_group_of_a_worker_has_the_configured_timeout(engine):
    assert engine.config.actor_rollout_ref.nccl_timeout == 600  # gloo's own default is 1800 seconds
    assert set(timeouts_of_process_groups(engine.worker)) == {600.0}


@pytest.mark.slow
def test_ray_worker_processes_have_the_timeout_that_was_typed(tiny_model, tmp_path, zygote, joined_ray):
    """Two ranks, started by the product: the time-outs are read back in their processes."""
    script = Path(__file__).with_name("worker_timeouts.py")
    command = [zygote.python, str(script), str(tiny_model), str(tmp_path), "actor_rollout_ref.nccl_timeout=37"]
    where = {"cwd": Path(__file__).parents[2], "env": os.environ | joined_ray}
    process = subprocess.run(command, capture_output=True, text=True, timeout=1200, **where)
    assert process.returncode == 0, process.stderr[-3000:]
    ranks = [line.split()[1:] for line in process.stdout.splitlines() if line.startswith("TIMEOUTS ")]
    assert len(ranks) == 2
    assert all(len(groups) > 1 and set(groups) == {"37.0"} for groups in ranks), ranks
