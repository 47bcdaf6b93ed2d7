"""The lists of verl's keys name keys that verl has, so that its next version is noticed."""

from __future__ import annotations

import hydra
import pytest
from omegaconf import OmegaConf

from recipe.dag.core.flatten import flatten
from recipe.dag.settings.compose import run_schema, verl_config_folder
from recipe.dag.settings.values import KINDS
from recipe.dag.settings.verl_run import READ, SAME
from recipe.dag.workflow.verl_keys import REPLACED

NOT_COMPOSED = {"mixed_precision", "recompute_mlp_only", "recompute_nothing"}
"""Keys of verl's dataclasses that its configuration files leave out, and dag.yaml's own below verl's sections."""
OTHERS = {"hydra", "actor_rollout_ref.model_params", "actor_rollout_ref.rollout.repetition_penalty"}
OTHERS |= {"actor_rollout_ref.actor.dpo_beta", "trainer.ref_update_freq"}
OTHERS |= {f"algorithm.dpo_{key}" for key in ("beta", "loss_type", "label_smoothing")}
"""Keys of hydra's, siiRL's and those of verl's recipe `spin`."""


@pytest.fixture(scope="module")
def known():
    with hydra.initialize_config_dir(str(verl_config_folder()), version_base=None):
        leaves = [key for key, _, _ in flatten(OmegaConf.to_container(hydra.compose("ppo_trainer")))]
    assert len(leaves) > 800
    return {".".join(key.split(".")[:n]) for key in leaves for n in range(1, key.count(".") + 2)}


def test_the_lists_name_only_keys_that_verl_has(known):
    absent = {key for key in (name.removesuffix(".*") for name in READ) if key not in known}
    assert {key.rpartition(".")[2] for key in absent} <= NOT_COMPOSED, absent
    assert {key for key in REPLACED if key not in known} == OTHERS
    assert set(SAME) <= known


def test_dag_yaml_sets_nothing_that_is_refused():
    schema = run_schema()
    changed = {key: value for key, value in schema.own.items() if not schema.is_read(key)}
    assert all(SAME[key] == value for key, value in changed.items()), changed


def test_no_key_is_read_and_refused_with_a_replacement():
    schema, by_policies = run_schema(), {"actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n"}
    assert {key for key in REPLACED if schema.is_read(key)} == by_policies | {"critic.optim.lr"}


def test_a_key_whose_default_is_null_has_a_kind():
    schema = run_schema()
    empty = [key for key, value in schema.values.items() if value is None and schema.is_read(key)]
    assert [key for key in empty if key not in KINDS] == [], "say in recipe/dag/settings/values.py what they take"
