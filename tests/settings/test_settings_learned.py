"""The keys of a configuration that a resumed run may change."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from recipe.dag.settings.compose import CONFIG_FOLDER, compose_config
from recipe.dag.settings.learned_config import UNLEARNED, affects_learning, learned_config
from recipe.dag.settings.schema import tree_of, values_of
from recipe.dag.workflow.verl_reads import is_listed


@pytest.mark.parametrize("name", UNLEARNED)
def test_every_entry_is_a_key_of_the_file(name):
    groups = ("engine.mixed_precision.*", "profiler.*")  # of verl
    keys = values_of(tree_of(OmegaConf.load(CONFIG_FOLDER / f"{name}.yaml")))
    assert [entry for entry in UNLEARNED[name].split() if not any(is_listed(key, [entry]) for key in keys)] == (
        list(groups) if name == "sft" else []
    )


@pytest.mark.parametrize("key", ["data.new_key", "sandbox.new_limit", "actor_rollout_ref.actor.new_loss"])
def test_a_key_that_is_not_listed_counts(key):
    assert affects_learning(key, "dag")


@pytest.mark.parametrize("on_flag", ["report", "mask", "stop"])
def test_rules_count_only_where_what_they_flag_leaves_the_loss(on_flag):
    settings = ["workflow=w", "data.train_files=t", f"report.on_flag={on_flag}", "report.monitors=[many_boxes]"]
    run = learned_config(compose_config("dag", settings), critics=False)["run"]
    learned = {key: value for key, value in run.items() if key.startswith("report.")}
    masks = {"report.monitors": ["many_boxes"], "report.on_flag": "mask"}
    assert learned == (masks if on_flag == "mask" else {})
