"""Paths mean the folder in which the command was typed, whatever folder opens them."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.settings.absolute import absolute_if_local, make_absolute
from recipe.dag.settings.compose import compose_config


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def composed(*overrides: str):
    config = compose_config("dag", ["workflow=flow.yaml", *overrides])
    make_absolute(config)
    return config


def test_what_a_run_writes_is_absolute_before_it_exists(here):
    config = composed("trainer.experiment_name=x")
    assert config.output_dir == str(here / "outputs" / "x")
    assert config.trainer.default_local_dir == str(here / "outputs" / "x" / "checkpoints")
    config = composed("trainer.default_local_dir=../ckpt", "trainer.resume_from_path=old/global_step_3")
    assert config.trainer.default_local_dir == str(here.parent / "ckpt")
    assert config.trainer.resume_from_path == str(here / "old" / "global_step_3")
    profiler = config.actor_rollout_ref.actor.profiler
    assert profiler.save_path == str(here / "outputs" / "profile"), "an interpolation of an absolute path"


def test_what_a_run_reads_is_absolute_where_it_exists_and_hub_names_stay(here):
    (here / "flow.yaml").touch()
    (here / "data").mkdir()
    (here / "data" / "a.parquet").touch()
    (here / "router.yaml").touch()
    config = composed(
        "data.train_files=[data/a.parquet,openai/gsm8k]",
        "data.val_files=data/a.parquet",
        "model_path=Qwen/Qwen2.5-3B-Instruct",
        "actor_rollout_ref.rollout.router_config_path=router.yaml",
    )
    assert config.workflow == str(here / "flow.yaml")
    assert config.data.train_files == [str(here / "data" / "a.parquet"), "openai/gsm8k"]
    assert config.data.val_files == str(here / "data" / "a.parquet")
    assert config.model_path == "Qwen/Qwen2.5-3B-Instruct"
    assert config.actor_rollout_ref.rollout.router_config_path == str(here / "router.yaml")


def test_the_home_folder_is_filled_in(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert composed("output_dir='~/out'").output_dir == str(here / "out")
    assert absolute_if_local("~nobody-of-this-name/x") == "~nobody-of-this-name/x"
    assert absolute_if_local(None) is None


def test_a_url_to_write_to_is_refused(here):
    with pytest.raises(UserError, match="trainer.default_local_dir=hdfs://a/b is a URL"):
        composed("trainer.default_local_dir='hdfs://a/b'")


def test_nothing_else_of_the_configuration_changes(here):
    before = OmegaConf.to_container(compose_config("dag", ["workflow=flow.yaml"]), resolve=False)
    after = OmegaConf.to_container(composed(), resolve=False)

    def leaves(node, key=""):
        if isinstance(node, dict):
            return {k: v for name, value in node.items() for k, v in leaves(value, f"{key}.{name}").items()}
        return {key: node}

    changed = {key for key, value in leaves(after).items() if leaves(before).get(key) != value}
    assert changed == {".output_dir", ".trainer.default_local_dir", ".global_profiler.save_path"}
