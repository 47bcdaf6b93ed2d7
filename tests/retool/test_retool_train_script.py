"""train_retool_grpo.sh: three positional arguments, a name, and overrides, of which none is taken for the other."""

from __future__ import annotations

import os
import subprocess

import pytest

from recipe.dag.settings.compose import compose_config
from tests.scripts.training_script import ROOT, TrainingScript
from tests.workflow.shapes import QWEN, write_config

SCRIPT = ROOT / "recipe" / "retool" / "train_retool_grpo.sh"


@pytest.fixture
def script(tmp_path) -> TrainingScript:
    return TrainingScript(SCRIPT, tmp_path, data="a data, set=1", test="val")


def settings_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "recipe.dag.main"]
    assert words[2:6] == ["--config-path", "recipe/retool/config", "--config-name", "full"]
    assert all("=" in word for word in words[6:]), "no positional argument is among the overrides"
    return dict(word.split("=", 1) for word in words[6:])


def test_the_arguments_become_settings_and_the_rest_follows(script):
    done = script.run(script.model, script.data, script.out, "first", "trainer.nnodes=2", "+profile=gpu_32gb")
    settings = settings_of(done)
    assert settings["model_path"] == f"'{script.model}'"
    assert settings["data.train_files"] == f"'{script.data}/train.parquet'"
    assert settings["data.val_files"] == f"'{script.data}/val.parquet'"
    assert settings["output_dir"] == f"'{script.out}'"
    assert settings["trainer.experiment_name"] == "'first'"
    assert list(settings)[-2:] == ["trainer.nnodes", "+profile"]


@pytest.mark.parametrize(
    ("env", "logger"),
    [
        ({}, None),
        ({"WANDB_KEY": "k"}, "[console,swanlab,wandb]"),
        ({"WANDB_API_KEY": "k", "SWANLAB_API_KEY": "k"}, "[console,swanlab,wandb]"),
    ],
)
def test_a_key_of_a_logger_turns_it_on(script, env, logger):
    assert settings_of(script.run(script.model, script.data, script.out, **env)).get("trainer.logger") == logger


@pytest.mark.parametrize("key", ["data.train_batch_size", "workflow.agents.*.sampling.top_k"])
def test_the_name_is_optional_and_an_override_is_not_taken_for_it(script, key):
    settings = settings_of(script.run(script.model, script.data, script.out, f"{key}=8"))
    assert settings["trainer.experiment_name"] == "'retool_grpo'" and settings[key] == "8"


def test_relative_paths_are_relative_to_the_callers_folder(script):
    done = script.run("model", script.data.name, "out", cwd=script.model.parent)
    settings = settings_of(done)
    assert settings["model_path"] == f"'{script.model}'" and settings["output_dir"] == f"'{script.out}'"


def test_the_output_of_an_sft_run_stands_for_its_newest_checkpoint(script):
    (script.model / "config.json").unlink()
    for step in (9, 10):
        folder = script.model / "checkpoints" / f"global_step_{step}" / "main" / "actor" / "huggingface"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    settings = settings_of(script.run(script.model, script.data, script.out))
    assert settings["model_path"].endswith("/global_step_10/main/actor/huggingface'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, d, o: [], "0 of 3 arguments; usage: bash"),
        (lambda m, d, o: [m, d], "2 of 3 arguments; usage: bash"),
        (lambda m, d, o: [m, d, "trainer.nnodes=2"], "2 of 3 arguments"),
        (lambda m, d, o: [m, d, o, "name", "extra"], "extra: a fifth argument"),
        (lambda m, d, o: [m, d, o, "a.b=1", "name"], "name: it follows a key=value"),
        (lambda m, d, o: ["/path/to/sft", d, o], "SFT_MODEL: '/path/to/sft' is a placeholder"),
        (lambda m, d, o: [m, "<DATA_DIR>", o], "DATA_DIR: '<DATA_DIR>' is a placeholder"),
        (lambda m, d, o: [m, d, "OUTPUT_DIR"], "OUTPUT_DIR: 'OUTPUT_DIR' is a placeholder"),
        (lambda m, d, o: [m, d, ""], "OUTPUT_DIR: '' is a placeholder"),
        (lambda m, d, o: [m / "none", d, o], "model/none is not a folder"),
        (lambda m, d, o: [d, d, o], "has neither config.json nor"),
        (lambda m, d, o: [m, m, o], "model/train.parquet does not exist"),
        (lambda m, d, o: [m, d, m / "config.json"], "config.json is a file; pass a folder"),
        (lambda m, d, o: [m, d, o, "a/b"], "EXPERIMENT_NAME: a/b is a path"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(script, change, message):
    script.expect_refusal(message, *change(script.model, script.data, script.out))


def test_without_val_parquet_it_is_refused(script):
    (script.data / "val.parquet").unlink()
    script.expect_refusal("val.parquet does not exist", script.model, script.data, script.out)


def test_without_a_gpu_it_points_to_the_laptop_unless_the_run_is_for_one(script):
    arguments = (script.model, script.data, script.out)
    script.expect_refusal("no NVIDIA GPU here", *arguments, gpu=False)
    assert script.run(*arguments, gpu=False, CONFIG="tiny_cpu").returncode == 0
    assert script.run(*arguments, "platform=cpu", gpu=False).returncode == 0
    script.expect_refusal("CONFIG=huge: recipe/retool/config has no huge.yaml", *arguments, CONFIG="huge")


@pytest.mark.parametrize("config", ["full", "small"])
def test_show_checks_every_setting_of_a_profile_without_a_gpu(script, zygote, config):
    write_config(script.model, QWEN["7b"] | {"architectures": ["Qwen2ForCausalLM"]})
    env = {"PYTHON": str(zygote.python), "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/"), "CONFIG": config}
    arguments = (script.model, script.data, script.out, "workflow.algorithm.clip_ratio_high=0.28")
    done = script.run(*arguments, gpu=False, SHOW="1", GPU_GB="80", **env)
    assert done.returncode == 0, done.stderr
    assert "1 + 0.28" in done.stdout and "retool (workflow_retool.yaml)" in done.stdout
    wrong = script.run(*arguments, "algorithm.kl_ctrl.kl_coef=1", gpu=False, SHOW="1", **env)
    assert wrong.returncode == 2 and "algorithm.kl_ctrl.kl_coef" in wrong.stderr


def test_the_full_profile_has_the_published_values():
    config = compose_config(
        "full", ["workflow=workflows/workflow_retool.yaml", "data.train_files=x"], ROOT / "recipe" / "retool" / "config"
    )
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (config.data.train_batch_size, rollout.n, actor.optim.lr) == (256, 8, 1e-6)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 4096)
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == ("sglang", 2, 0.5)
    assert (actor.strategy, actor.kl_loss_type) == ("fsdp2", "low_var_kl")
    trainer = config.trainer
    assert (trainer.n_gpus_per_node, trainer.total_training_steps) == (8, 100)
    assert (trainer.save_freq, trainer.test_freq, list(trainer.logger)) == (20, 20, ["console", "swanlab"])
