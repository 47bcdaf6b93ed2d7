"""Everything that is shipped to be used as it is: workflows, configurations, run scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.dag.errors import UserError
from recipe.dag.main import CONFIG_FOLDER, compose_config
from recipe.dag.workflow import render
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.plan import make_plan

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted([*ROOT.glob("workflows/*.yaml"), *ROOT.glob("examples/**/workflow*.yaml")])
CONFIGS = sorted(ROOT.glob("recipe/*/config/*.yaml"))
PROFILES = sorted(CONFIG_FOLDER.glob("profile/*.yaml"))
SCRIPTS = sorted([*ROOT.glob("recipe/**/*.sh"), ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"])
REQUIRED = ["workflow=w.yaml", "data.train_files=train.parquet"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", WORKFLOWS, ids=relative)
def test_workflow_is_valid_and_can_be_shown(file):
    workflow = load_workflow(file)
    plan = make_plan(workflow)
    assert workflow.dag_id in render.to_text(plan)
    assert render.to_mermaid(plan).count("-->") >= len(workflow.rollout_nodes)
    assert json.loads(render.to_json(plan))["dag_id"] == workflow.dag_id


def test_workflow_names_are_distinct():
    names = [load_workflow(file).dag_id for file in WORKFLOWS]
    assert len(set(names)) == len(names) >= 5


@pytest.mark.parametrize("file", CONFIGS, ids=relative)
def test_configuration_composes_and_resolves(file):
    config = compose_config(file.stem, REQUIRED, file.parent)
    OmegaConf.to_container(config.data, resolve=True)
    OmegaConf.to_container(config.actor_rollout_ref, resolve=True)
    assert config.workflow == "w.yaml" and config.output_dir and int(config.trainer.n_gpus_per_node) >= 1


@pytest.mark.parametrize("profile", PROFILES, ids=relative)
@pytest.mark.parametrize("base", [f for f in CONFIGS if f.stem in ("dag", "qwen2_5_3b")], ids=relative)
def test_profile_overrules_the_configuration_and_the_command_line_overrules_it(profile, base):
    overrides = [*REQUIRED, f"+profile={profile.stem}"]
    content = OmegaConf.load(profile)
    config = compose_config(base.stem, overrides, base.parent)
    assert config.data.max_prompt_length == content.data.max_prompt_length
    assert config.actor_rollout_ref.actor.fsdp_config.offload_policy
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= longest
    config = compose_config(base.stem, [*overrides, "data.max_prompt_length=77"], base.parent)
    assert config.data.max_prompt_length == 77


@pytest.mark.parametrize("file", CONFIGS, ids=relative)
def test_configuration_without_a_workflow_asks_for_one(file):
    with pytest.raises(UserError, match="no value for workflow; pass it as workflow="):
        compose_config(file.stem, [], file.parent)


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_script_parses(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


RECIPES = [script for script in SCRIPTS if script.parent.name in ("retool_ma", "marft", "debate")]


@pytest.mark.parametrize("script", RECIPES, ids=relative)
def test_run_script_names_files_that_exist(script):
    words = script.read_text().replace('"', " ").replace("{", " ").replace("}", " ").replace(":-", " ").split()
    named = [w.partition(":")[0] for w in words if w.startswith(("recipe/", "preprocess/", "workflows/"))]
    assert named and [word for word in named if not (ROOT / word).exists()] == []


def run_gpu_script(path: str, **env: str) -> subprocess.CompletedProcess:
    script = ROOT / "recipe" / "retool_ma" / "run_qwen2_5-3b.sh"
    env = {"PATH": path, "HOME": os.environ.get("HOME", "/"), **env}
    return subprocess.run([shutil.which("bash"), str(script)], env=env, capture_output=True, text=True)


def expect_refusal(done: subprocess.CompletedProcess, what: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and what in done.stderr
    assert "bash recipe/retool_ma/run_tiny_cpu.sh" in done.stderr


@pytest.fixture
def tools(tmp_path) -> Path:
    """A PATH with what the script needs before it starts Python, and no nvidia-smi."""
    for name in ("bash", "dirname", "grep"):
        (tmp_path / name).symlink_to(shutil.which(name))
    return tmp_path


def test_gpu_script_without_a_gpu_points_to_the_tiny_run(tools):
    expect_refusal(run_gpu_script(str(tools), MODEL_PATH="model"), "no NVIDIA GPU")


def test_gpu_script_without_a_model_points_to_the_tiny_run(tools):
    smi = tools / "nvidia-smi"
    smi.write_text(f"#!{shutil.which('bash')}\necho 'GPU 0: a card'\n")
    smi.chmod(0o755)
    expect_refusal(run_gpu_script(str(tools)), "set MODEL_PATH")


@pytest.mark.parametrize(("extra", "asked"), [(None, "[cpu]"), ("dev", "[cpu,dev]")])
def test_overrides_of_a_run_are_no_packages(extra, asked, tmp_path):
    """A sourced file sees the arguments of the script that sources it."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "VERL_DAG_VENV": str(tmp_path / "venv")}
    environment |= {"VERL_DAG_EXTRA": extra} if extra else {}
    script = f"set -eu; . {ROOT}/recipe/dag/scripts/cpu_env.sh"
    subprocess.run(["bash", "-c", script, "run", "trainer.total_training_steps=3"], env=environment, check=True)
    *_, last = (tmp_path / "asked").read_text().splitlines()
    assert last.endswith(f"-e {ROOT}{asked}") and "trainer" not in (tmp_path / "asked").read_text()
