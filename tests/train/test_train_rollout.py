"""How many episodes of a run are under way at once."""

from __future__ import annotations

import pytest

from recipe.dag.settings.compose import compose_config
from recipe.dag.train.rollout import episodes_at_once


@pytest.mark.parametrize(
    ("settings", "episodes"),
    [
        ([], 512),
        (["trainer.n_gpus_per_node=4"], 2048),
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=3"], 3072),
        (["trainer.n_gpus_per_node=4", "rollout.max_in_flight=7"], 7),
    ],
)
def test_each_gpu_has_as_many_episodes_as_one_alone(settings, episodes):
    config = compose_config("dag", ["workflow=w.yaml", "data.train_files=none", *settings])
    assert episodes_at_once(config) == episodes
